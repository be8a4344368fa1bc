
// ---------------------------------------------------------------- lanes of blocks on a canvas

const AXIS = 24, GAP = 3, BLOCK_LABEL = 34;

// Luminance and contrast of colours such as #1b2128, as the Web Content Accessibility Guidelines have them.
function luminance(colour) {
  const [r, g, b] = colour.match(/[0-9a-f]{2}/gi).map((part) => {
    const value = parseInt(part, 16) / 255;
    return value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4;
  });
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
}

function contrast(one, other) {
  const [low, high] = [luminance(one), luminance(other)].sort((a, b) => a - b);
  return (high + 0.05) / (low + 0.05);
}

// Black or white, whichever is read better on a colour.
function inkOn(colour) {
  return contrast("#14181d", colour) > contrast("#ffffff", colour) ? "#14181d" : "#ffffff";
}

// Round distances between marks, at most so many in a span.
function tickStep(span, most) {
  const least = span / most, power = 10 ** Math.floor(Math.log10(least));
  return [1, 2, 5, 10].map((n) => n * power).find((step) => step >= least);
}

// Blocks on lanes along one axis, to be zoomed and panned, with one block in focus. `axis` says where a
// task begins and ends, how long all is, and what is written at a mark. Only what is visible is drawn.
class Lanes {
  constructor(canvas, data, axis, onFocus) {
    Object.assign(this, { canvas, data, axis, onFocus });
    this.context = canvas.getContext("2d");
    this.lanes = data.streams.map(() => []);
    data.tasks.forEach((task, i) => this.lanes[task.lane].push(i));
    for (const lane of this.lanes) lane.sort((a, b) => axis.start(data.tasks[a]) - axis.start(data.tasks[b]));
    this.after = data.tasks.map(() => []);
    data.tasks.forEach((task, i) => task.waits.forEach((earlier) => this.after[earlier].push(i)));
    this.show = { waits: true, critical: true };
    this.focus = null;
    this.pinned = false;
    this.pointers = new Map();
    this.view = { from: 0, to: axis.total };
    this.listen();
    new ResizeObserver(() => this.resize()).observe(canvas.parentElement);
  }

  // -------------------------------------------------------------- geometry

  resize() {
    const width = this.canvas.parentElement.clientWidth, ratio = devicePixelRatio || 1;
    this.width = width;
    this.gutter = width < 600 ? 34 : 78;
    this.row = Math.max(9, Math.min(34, 540 / this.lanes.length));
    this.height = AXIS + this.row * this.lanes.length + 6;
    this.canvas.style.height = `${this.height}px`;
    this.canvas.width = width * ratio;
    this.canvas.height = this.height * ratio;
    this.context.setTransform(ratio, 0, 0, ratio, 0, 0);
    this.draw();
  }

  x(value) {
    return this.gutter + (value - this.view.from) / (this.view.to - this.view.from) * (this.width - this.gutter - 8);
  }

  value(x) {
    return this.view.from + (x - this.gutter) / (this.width - this.gutter - 8) * (this.view.to - this.view.from);
  }

  middle(lane) { return AXIS + this.row * (lane + 0.5); }

  // The first place in a lane whose block ends at or after a value.
  place(lane, value) {
    const { tasks } = this.data, order = this.lanes[lane];
    let low = 0, high = order.length;
    while (low < high) {
      const half = (low + high) >> 1;
      if (this.axis.end(tasks[order[half]]) < value) low = half + 1; else high = half;
    }
    return low;
  }

  // The task at a point, blocks thinner than a few pixels included; null if there is none.
  at(x, y) {
    const lane = Math.floor((y - AXIS) / this.row);
    if (x < this.gutter || !(lane in this.lanes)) return null;
    const near = 3 / (this.width - this.gutter) * (this.view.to - this.view.from), value = this.value(x);
    const order = this.lanes[lane], first = this.place(lane, value - near);
    const found = order.slice(first, first + 8).map((i) => {
      const task = this.data.tasks[i];
      return [Math.max(this.axis.start(task) - value, value - this.axis.end(task), 0), i];
    }).filter(([distance]) => distance <= near).sort((a, b) => a[0] - b[0]);
    return found.length ? found[0][1] : null;
  }

  // -------------------------------------------------------------- moving

  look(from, to) {
    const { total } = this.axis, least = total / 20000;
    const span = Math.min(total, Math.max(least, to - from));
    const centre = (from + to) / 2;
    const start = Math.max(0, Math.min(total - span, centre - span / 2));
    this.view = { from: start, to: start + span };
    this.draw();
    if (this.focus !== null) this.onLook?.();
  }

  fit() { this.look(0, this.axis.total); }

  zoom(factor, about = (this.view.from + this.view.to) / 2) {
    const { from, to } = this.view, span = Math.min(this.axis.total, (to - from) / factor);
    const start = about - (about - from) * span / (to - from);
    this.look(start, start + span);
  }

  pan(share) {
    const span = this.view.to - this.view.from;
    this.look(this.view.from + share * span, this.view.to + share * span);
  }

  // Put a task in focus; with `reveal` the view is moved to where it is seen.
  set(task, { pinned = this.pinned, reveal = false, quiet = false } = {}) {
    if (task === this.focus && pinned === this.pinned && !reveal) return;
    this.focus = task;
    this.pinned = pinned && task !== null;
    if (task !== null && reveal) this.reveal(this.data.tasks[task]);
    this.draw();
    if (!quiet) this.onFocus(this, task);
  }

  reveal(task) {
    const { from, to } = this.view, start = this.axis.start(task), end = this.axis.end(task);
    const span = Math.max(Math.min(to - from, (end - start) * 40), end - start);
    if (start < from || end > to || span < to - from) this.look((start + end - span) / 2, (start + end + span) / 2);
    const box = this.canvas.parentElement, y = this.middle(task.lane);
    if (y - this.row < box.scrollTop || y + this.row > box.scrollTop + box.clientHeight) box.scrollTop = y - box.clientHeight / 2;
  }

  step(sideways, down) {
    const { tasks } = this.data;
    if (this.focus === null) {
      const order = this.lanes[0];
      return this.set(order[Math.min(order.length - 1, this.place(0, this.view.from))], { pinned: true, reveal: true });
    }
    const task = tasks[this.focus], lane = task.lane + down;
    if (!(lane in this.lanes)) return undefined;
    const order = this.lanes[lane];
    const next = down ? this.place(lane, this.axis.start(task)) : order.indexOf(this.focus) + sideways;
    return this.set(order[Math.max(0, Math.min(order.length - 1, next))], { pinned: true, reveal: true });
  }

  // -------------------------------------------------------------- listening

  listen() {
    const { canvas } = this, on = (name, call) => canvas.addEventListener(name, call.bind(this));
    on("wheel", this.onWheel);
    on("keydown", this.onKey);
    on("pointerdown", this.onDown);
    on("pointermove", this.onMove);
    on("pointerup", this.onUp);
    on("pointercancel", this.onUp);
    on("pointerleave", () => { if (!this.pinned && !this.pointers.size) this.set(null); });
  }

  // The wheel alone scrolls the page, unless the lanes were clicked on.
  onWheel(event) {
    const sideways = event.shiftKey ? event.deltaY || event.deltaX : event.deltaX;
    if (event.ctrlKey || event.metaKey || (document.activeElement === this.canvas && event.deltaY && !event.shiftKey)) {
      this.zoom(Math.exp(-Math.max(-240, Math.min(240, event.deltaY)) / 300), this.value(event.offsetX));
    } else if (Math.abs(sideways) > Math.abs(event.shiftKey ? 0 : event.deltaY)) {
      this.pan(sideways / this.width);
    } else {
      return;
    }
    event.preventDefault();
  }

  onKey(event) {
    const keys = {
      ArrowLeft: () => (event.shiftKey ? this.pan(-0.2) : this.step(-1, 0)),
      ArrowRight: () => (event.shiftKey ? this.pan(0.2) : this.step(1, 0)),
      ArrowUp: () => this.step(0, -1),
      ArrowDown: () => this.step(0, 1),
      "+": () => this.zoomAtFocus(1.6),
      "=": () => this.zoomAtFocus(1.6),
      "-": () => this.zoomAtFocus(1 / 1.6),
      0: () => this.fit(),
      Home: () => this.fit(),
      Escape: () => this.set(null),
      Enter: () => this.focus !== null && this.onChoose?.(this.focus),
    };
    if (event.ctrlKey || event.metaKey || event.altKey || !(event.key in keys)) return;
    keys[event.key]();
    event.preventDefault();
  }

  zoomAtFocus(factor) {
    const task = this.focus === null ? null : this.data.tasks[this.focus];
    this.zoom(factor, task ? (this.axis.start(task) + this.axis.end(task)) / 2 : undefined);
  }

  onDown(event) {
    this.pointers.set(event.pointerId, event.offsetX);
    this.moved = 0;
    if (event.isPrimary && event.pointerType === "mouse" && event.button !== 0) return;
    this.canvas.setPointerCapture(event.pointerId);
  }

  onMove(event) {
    const before = this.pointers.get(event.pointerId);
    if (before === undefined) {
      const task = this.at(event.offsetX, event.offsetY);
      this.canvas.classList.toggle("over", task !== null);
      if (!this.pinned) this.set(task);
      return;
    }
    const others = [...this.pointers].filter(([id]) => id !== event.pointerId).map(([, x]) => x);
    this.pointers.set(event.pointerId, event.offsetX);
    this.moved += Math.abs(event.offsetX - before);
    if (others.length) {
      const [still] = others, apart = Math.abs(before - still);
      if (apart > 8) this.zoom(Math.max(8, Math.abs(event.offsetX - still)) / apart, this.value(still));
    } else if (this.moved > 3) {
      this.canvas.classList.add("dragged");
      this.pan((before - event.offsetX) / (this.width - this.gutter));
    }
  }

  onUp(event) {
    this.pointers.delete(event.pointerId);
    this.canvas.classList.remove("dragged");
    if (event.type === "pointerup" && this.moved <= 3) {
      const task = this.at(event.offsetX, event.offsetY);
      this.set(task, { pinned: true });
    }
  }

  // -------------------------------------------------------------- drawing

  draw() {
    const { from, to } = this.view;
    this.canvas.dataset.from = from;
    this.canvas.dataset.to = to;
    this.canvas.dataset.task = this.focus === null ? "" : this.data.tasks[this.focus].name;
    if (this.asked) return;
    this.asked = requestAnimationFrame(() => this.paint());
  }

  paint() {
    this.asked = 0;
    if (!this.width) return;
    const style = getComputedStyle(root), colour = (name) => style.getPropertyValue(`--${name}`).trim();
    this.colours = Object.fromEntries(["text", "soft", "rule", "hover", "card", "accent"].map((n) => [n, colour(n)]));
    this.kinds = this.data.kinds.map((_, i) => colour(`k${i}`));
    this.inks = this.kinds.map(inkOn);
    this.font = style.fontFamily || "sans-serif";
    const { context } = this;
    context.clearRect(0, 0, this.width, this.height);
    this.paintGround();
    context.save();
    context.beginPath();
    context.rect(this.gutter, 0, this.width - this.gutter, this.height);
    context.clip();
    const visible = this.paintBlocks();
    if (this.show.waits) this.paintWaits(visible);
    if (this.show.critical) this.paintPath();
    this.paintFocus();
    context.restore();
  }

  paintGround() {
    const { context, colours, row } = this, { from, to } = this.view;
    context.font = `11px ${getComputedStyle(document.body).fontFamily}`;
    context.textBaseline = "middle";
    const every = Math.ceil(13 / row);
    this.lanes.forEach((_, lane) => {
      context.fillStyle = lane % 2 ? colours.card : colours.hover;
      context.fillRect(0, AXIS + lane * row, this.width, row);
      if (lane % every) return;
      const { number, first } = this.data.streams[lane];
      context.fillStyle = colours.soft;
      context.textAlign = "right";
      context.fillText((this.gutter > 40 ? `stream ${number}` : number) + (first ? " ▲" : ""), this.gutter - 8, this.middle(lane));
    });
    context.textAlign = "left";
    const step = tickStep(to - from, Math.max(2, (this.width - this.gutter) / 90));
    for (let at = Math.ceil(from / step) * step; at <= to; at += step) {
      const x = this.x(at), text = this.axis.mark(at, step);
      if (!text) continue;
      context.fillStyle = colours.rule;
      context.fillRect(x, AXIS - 6, 1, this.height);
      context.fillStyle = colours.soft;
      if (x + 4 + context.measureText(text).width < this.width) context.fillText(text, x + 4, AXIS / 2 - 1);
    }
  }

  // Draws the blocks and returns which tasks they are of.
  paintBlocks() {
    const { context, axis, row } = this, { tasks } = this.data, visible = new Set();
    const inset = row > 14 ? GAP : 1;
    context.textAlign = "left";
    this.lanes.forEach((order, lane) => {
      const y = AXIS + lane * row + inset, high = row - 2 * inset;
      if (axis.linked) this.paintLink(order, lane);
      for (let place = this.place(lane, this.view.from); place < order.length; place += 1) {
        const task = tasks[order[place]], left = this.x(axis.start(task));
        if (left > this.width) break;
        const right = Math.max(left + 0.75, this.x(axis.end(task)) - 0.5);
        visible.add(order[place]);
        context.fillStyle = this.kinds[task.kind];
        context.beginPath();
        context.roundRect(left, y, right - left, high, right - left > 8 ? axis.round : 0);
        context.fill();
        if (this.show.critical && task.critical) {
          context.fillStyle = this.colours.accent;
          context.fillRect(left, y + high - Math.min(3, high / 3), right - left, Math.min(3, high / 3));
        }
        const shown = Math.min(right, this.width) - Math.max(left, this.gutter);
        if (shown > BLOCK_LABEL && row > 15) this.paintLabel(task, Math.max(left, this.gutter), shown, y + high / 2);
      }
    });
    return visible;
  }

  // The order of a lane, where its blocks are apart.
  paintLink(order, lane) {
    const { tasks } = this.data, from = this.x(this.axis.end(tasks[order[0]]));
    this.context.fillStyle = this.colours.soft;
    this.context.fillRect(from, this.middle(lane) - 0.5, this.x(this.axis.start(tasks[order.at(-1)])) - from, 1);
  }

  paintLabel(task, left, width, y) {
    const { context } = this, room = width - 8;
    let { name } = task, most = Math.min(name.length, Math.ceil(room / 4));
    if (most < name.length) name = `${name.slice(0, most)}…`;
    while (most > 1 && context.measureText(name).width > room) name = `${task.name.slice(0, --most)}…`;
    context.fillStyle = this.inks[task.kind];
    context.fillText(name, left + 4, y);
  }

  // A wait as a curve from the end of one block to the start of another.
  curve(earlier, later) {
    const { context, axis } = this, a = this.data.tasks[earlier], b = this.data.tasks[later];
    const x0 = this.x(axis.end(a)), x1 = this.x(axis.start(b)), y0 = this.middle(a.lane), y1 = this.middle(b.lane);
    const bend = Math.max(10, Math.min(60, Math.abs(x1 - x0) / 2));
    context.moveTo(x0, y0);
    context.bezierCurveTo(x0 + bend, y0, x1 - bend, y1, x1, y1);
  }

  arrow(later) {
    const { context } = this, task = this.data.tasks[later];
    const x = this.x(this.axis.start(task)), y = this.middle(task.lane);
    context.moveTo(x, y);
    context.lineTo(x - 6, y - 3.5);
    context.lineTo(x - 6, y + 3.5);
    context.closePath();
  }

  paintWaits(visible) {
    const { context, colours } = this, pairs = [];
    for (const i of visible) {
      for (const earlier of this.data.tasks[i].waits) pairs.push([earlier, i]);
      for (const later of this.after[i]) if (!visible.has(later)) pairs.push([i, later]);
    }
    const crowd = 40 * pairs.length / this.width;
    context.globalAlpha = Math.max(0.25, Math.min(0.8, 2.5 / crowd));
    context.strokeStyle = context.fillStyle = colours.text;
    context.lineWidth = 1;
    context.beginPath();
    for (const [earlier, later] of pairs) this.curve(earlier, later);
    context.stroke();
    if (crowd < 6) {
      context.beginPath();
      for (const [, later] of pairs) this.arrow(later);
      context.fill();
    }
    context.globalAlpha = 1;
  }

  // Where the critical path goes from one lane to another.
  paintPath() {
    const { context, data } = this;
    context.strokeStyle = this.colours.accent;
    context.lineWidth = 2;
    context.beginPath();
    data.path.forEach((task, i) => {
      if (i && data.tasks[task].lane !== data.tasks[data.path[i - 1]].lane) this.curve(data.path[i - 1], task);
    });
    context.stroke();
  }

  paintFocus() {
    if (this.focus === null) return;
    const { context, axis, row } = this, task = this.data.tasks[this.focus];
    context.strokeStyle = context.fillStyle = this.colours.text;
    context.lineWidth = 2;
    context.beginPath();
    for (const earlier of task.waits) this.curve(earlier, this.focus);
    for (const later of this.after[this.focus]) this.curve(this.focus, later);
    context.stroke();
    context.beginPath();
    if (task.waits.length) this.arrow(this.focus);
    for (const later of this.after[this.focus]) this.arrow(later);
    context.fill();
    const left = this.x(axis.start(task)), right = this.x(axis.end(task));
    context.strokeRect(left - 1, AXIS + task.lane * row + 1, Math.max(3, right - left) + 1, row - 2);
  }

  // Where the block in focus is on the screen.
  spot() {
    const box = this.canvas.getBoundingClientRect(), task = this.data.tasks[this.focus];
    const left = Math.max(this.gutter, Math.min(this.width, this.x(this.axis.start(task))));
    const top = box.top + AXIS + task.lane * this.row;
    return { x: box.left + left, top, bottom: top + this.row, end: box.bottom };
  }
}
