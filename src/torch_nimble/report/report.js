
// ---------------------------------------------------------------- the report

const data = JSON.parse(document.getElementById("data").textContent);

function amount(value) {
  if (data.unit !== "µs") return `${+value.toFixed(2)} ${data.unit}`;
  if (value >= 10000) return `${(value / 1000).toFixed(2)} ms`;
  return `${value.toFixed(value < 100 ? 2 : 1)} µs`;
}

const AXES = {
  timeline: {
    start: (task) => task.start,
    end: (task) => task.end,
    total: data.total || 1,
    round: 2,
    linked: false,
    mark(value, step) {
      if (data.unit !== "µs") return `${+value.toFixed(2)}`;
      const [scale, unit] = this.total >= 10000 ? [1000, "ms"] : [1, "µs"];
      return `${(value / scale).toFixed(Math.max(0, -Math.floor(Math.log10(step / scale))))} ${unit}`;
    },
  },
  graph: {
    start: (task) => task.step,
    end: (task) => task.step + 0.72,
    total: Math.max(0, ...data.tasks.map((task) => task.step)) + 1,
    round: 6,
    linked: true,
    mark: (value) => (Number.isInteger(value) ? `${value}` : ""),
  },
};

// ---------------------------------------------------------------- the card of a task

const card = document.getElementById("card");

function element(name, text, className = "") {
  const made = document.createElement(name);
  made.textContent = text;
  made.className = className;
  return made;
}

function fillCard(task) {
  const stream = data.streams[task.lane].number;
  const about = element("p", data.kinds[task.kind] + (task.operator ? `: ${task.operator}` : ""));
  const swatch = element("i", "");
  swatch.style.background = `var(--k${task.kind})`;
  about.prepend(swatch);
  const list = document.createElement("dl");
  const say = (term, value, className) => list.append(element("dt", term), element("dd", value, className));
  say("time", `${amount(task.end - task.start)}, from ${amount(task.start)} to ${amount(task.end)}`);
  say("stream", `${stream}`);
  if (task.critical) say("path", "on the critical path", "critical");
  if (task.waits.length) say("waits for", task.waits.map((i) => data.tasks[i].name).join(", "));
  if (task.reads.length) say("reads", task.reads.join("; "));
  if (task.writes.length) say("writes", task.writes.join("; "));
  if (task.origin) say("from", task.origin);
  card.lastElementChild.replaceChildren(element("h3", task.name), about, list);
}

// Below the lanes if these end soon, so that none is hidden, or below the block, or above it where there is
// no room; on narrow screens the style puts it at the bottom.
function placeCard(lanes) {
  const { x, top, bottom, end } = lanes.spot(), room = innerHeight - card.offsetHeight;
  const below = [end - bottom < 150 ? end + 6 : bottom + 10, bottom + 10].find((place) => place < room);
  card.style.left = `${Math.max(8, Math.min(x, innerWidth - card.offsetWidth - 8))}px`;
  card.style.top = `${below ?? Math.max(8, top - 10 - card.offsetHeight)}px`;
}

let pointed; // the lanes whose block has the card

function onFocus(lanes, focused) {
  card.hidden = focused === null;
  for (const other of views) if (other !== lanes) other.set(focused, { pinned: false, quiet: true });
  if (focused === null) return;
  pointed = lanes;
  fillCard(data.tasks[focused]);
  placeCard(lanes);
}

function forget() { for (const view of views) view.set(null); }

card.firstElementChild.addEventListener("click", forget);
addEventListener("keydown", (event) => { if (event.key === "Escape" && !card.hidden) forget(); });
addEventListener("scroll", () => { if (!card.hidden && innerWidth > 900) forget(); }, { passive: true });

// ---------------------------------------------------------------- timeline and graph

const views = [...document.querySelectorAll(".view")].map((box) => {
  const lanes = new Lanes(box.querySelector("canvas"), data, AXES[box.dataset.view], onFocus);
  lanes.onChoose = showRow;
  lanes.onLook = () => { if (lanes === pointed && !card.hidden) placeCard(lanes); };
  const zooms = { in: () => lanes.zoom(1.6), out: () => lanes.zoom(1 / 1.6), fit: () => lanes.fit() };
  for (const button of box.querySelectorAll("[data-zoom]")) button.addEventListener("click", zooms[button.dataset.zoom]);
  for (const input of box.querySelectorAll("input")) {
    input.addEventListener("change", () => { lanes.show[input.name] = input.checked; lanes.draw(); });
  }
  return lanes;
});

function redraw() { for (const view of views) view.draw(); }
new MutationObserver(redraw).observe(root, { attributeFilter: ["data-theme"] });
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);

// Paper is white: what is printed is light, and whole.
let chosenTheme;
addEventListener("beforeprint", () => {
  chosenTheme = root.dataset.theme;
  root.dataset.theme = "light";
  for (const view of views) { view.set(null); view.fit(); view.paint(); }
});
addEventListener("afterprint", () => {
  if (chosenTheme === undefined) delete root.dataset.theme; else root.dataset.theme = chosenTheme;
});

// ---------------------------------------------------------------- the table of tasks

const rows = [...document.querySelectorAll("#tasks tbody tr")];
const filter = document.querySelector(".filter");
const texts = rows.map((row) => row.textContent.toLowerCase());

function applyFilter() {
  const words = filter.elements.text.value.toLowerCase().split(/\s+/).filter(Boolean);
  const kind = filter.elements.kind.value;
  let count = 0;
  rows.forEach((row, i) => {
    const kept = (!kind || data.kinds[data.tasks[i].kind] === kind) && words.every((word) => texts[i].includes(word));
    row.hidden = !kept;
    count += kept;
  });
  if (reached.hidden) reach(rows.find((row) => !row.hidden) ?? reached);
  filter.querySelector("output").textContent = count < rows.length ? `${count} of ${rows.length} tasks` : `${count} tasks`;
}

filter.addEventListener("input", applyFilter);
filter.addEventListener("submit", (event) => event.preventDefault());

function showRow(task) {
  if (rows[task].hidden) { filter.reset(); applyFilter(); }
  mark(task);
  enter(rows[task]);
  rows[task].scrollIntoView({ block: "center", behavior: "instant" });
}

function mark(task) { rows.forEach((row, i) => row.classList.toggle("shown", i === task)); }

function showTask(row) {
  const task = rows.indexOf(row);
  mark(task);
  views[0].canvas.scrollIntoView({ block: "center", behavior: "instant" });
  // The scrolling is told of later, and what it tells hides the card.
  requestAnimationFrame(() => requestAnimationFrame(() => views[0].set(task, { pinned: true, reveal: true })));
}

for (const row of rows) row.addEventListener("click", () => showTask(row));

// One row at a time can be reached with Tab; arrow keys go from it to those that are shown.
let reached = rows[0];

function reach(row) {
  if (reached) reached.tabIndex = -1;
  reached = row;
  if (reached) reached.tabIndex = 0;
}

function enter(row) {
  reach(row);
  row.focus({ preventScroll: true });
}

function beside(row, next) {
  do row = next ? row.nextElementSibling : row.previousElementSibling; while (row?.hidden);
  return row;
}

document.querySelector("#tasks tbody")?.addEventListener("keydown", (event) => {
  const row = event.target.closest("tr");
  if (event.ctrlKey || event.metaKey || event.altKey || event.shiftKey) return;
  if (event.key === "ArrowDown" || event.key === "ArrowUp") {
    const other = beside(row, event.key === "ArrowDown");
    if (other) { enter(other); other.scrollIntoView({ block: "nearest", behavior: "instant" }); }
  } else if (event.key === "Enter") {
    views[0].canvas.focus({ preventScroll: true });
    showTask(row);
  } else {
    return;
  }
  event.preventDefault();
});
reach(reached);
