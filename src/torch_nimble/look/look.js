"use strict";

// Numbers sort as numbers, words as words, and what is missing comes last either way.
function compare(a, b, down) {
  if (a === undefined || b === undefined) return (a === undefined) - (b === undefined);
  const both = a.trim() !== "" && b.trim() !== "" && !isNaN(a) && !isNaN(b);
  const order = both ? a - b : a.localeCompare(b, "en", { numeric: true });
  return down ? -order : order;
}

function sort(header) {
  const table = header.closest("table");
  const down = header.getAttribute("aria-sort") === "ascending";
  for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
  header.setAttribute("aria-sort", down ? "descending" : "ascending");
  const value = (row) => row.cells[header.cellIndex].dataset.v;
  const rows = [...table.tBodies[0].rows].sort((a, b) => compare(value(a), value(b), down));
  table.tBodies[0].append(...rows);
}

for (const button of document.querySelectorAll("thead button")) {
  button.addEventListener("click", () => sort(button.parentElement));
}

// A page opened from a file may have no storage; the choice then lasts as long as the page.
const stored = {
  read() { try { return localStorage.getItem("theme"); } catch { return null; } },
  write(theme) { try { localStorage.setItem("theme", theme); } catch { /* nothing is kept */ } },
};
const root = document.documentElement;
if (stored.read() === "dark" || stored.read() === "light") root.dataset.theme = stored.read();
document.getElementById("theme").addEventListener("click", () => {
  const system = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
  root.dataset.theme = (root.dataset.theme ?? system) === "dark" ? "light" : "dark";
  stored.write(root.dataset.theme);
});
