"use strict";
// Optional: adds copying, filtering, sorting, links into folds, and keys.

// A line that screen readers announce whenever it changes.
function status() {
  const line = document.createElement("span");
  line.className = "told";
  line.setAttribute("role", "status");
  return line;
}

function copying(block) {
  const button = document.createElement("button");
  button.type = "button";
  button.textContent = "Copy";
  const what = document.createElement("span");
  what.className = "sr";
  what.textContent = " command: " + block.querySelector("p").textContent;
  button.append(what);
  const told = status();
  button.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(block.querySelector("code").textContent);
      told.textContent = "Copied";
    } catch {
      getSelection().selectAllChildren(block.querySelector("code"));
      told.textContent = "Selected";
    }
  });
  block.append(button, told);
}

const valueOf = (row, column) => row.cells[column].textContent.trim();

// Sort key of a cell: the value of a number, percentage or multiple (1.2e+06×); NaN and Inf are largest, an
// empty cell is smallest; null for anything else.
function numberOf(text) {
  if (/^(NaN|Inf)$/.test(text)) return Infinity;
  if (text === "-Inf" || text === "–" || text === "") return -Infinity;
  const found = text.match(/^<?(-?[\d,]*\.?\d+(?:e[+-]?\d+)?) ?([×%]?)/i);
  if (!found) return null;
  const value = parseFloat(found[1].replaceAll(",", ""));
  return (found[2] === "%" ? value / 100 : value) - (text.startsWith("<") ? 1e-9 : 0);
}

// Columns of numbers are sorted by value, others as text.
function compare(a, b) {
  const [x, y] = [numberOf(a), numberOf(b)];
  if (x === null || y === null) return a.localeCompare(b);
  return x === y ? 0 : x - y;
}

// Content of a sort button: without glossary buttons, because buttons must not be nested.
function contents(head) {
  for (const word of head.querySelectorAll(".word")) word.replaceWith(...word.childNodes);
  return head.childNodes;
}

function sortable(table) {
  const body = table.tBodies[0];
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...contents(head));
    head.append(button);
    button.addEventListener("click", () => {
      const down = head.getAttribute("aria-sort") !== "descending";
      heads.forEach((h) => h.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      const rows = [...body.rows].sort((a, b) => compare(valueOf(a, column), valueOf(b, column)));
      body.append(...(down ? rows.reverse() : rows));
    });
  });
}

function filterable(table) {
  const label = document.createElement("label");
  const input = document.createElement("input");
  label.className = "filter";
  label.append("Filter rows", input);
  input.type = "search";
  const told = status();
  input.addEventListener("input", () => {
    const wanted = input.value.toLowerCase(), rows = [...table.tBodies[0].rows];
    for (const row of rows) row.hidden = !row.textContent.toLowerCase().includes(wanted);
    const left = rows.filter((row) => !row.hidden).length;
    told.textContent = wanted ? `${left} of ${rows.length} rows` : "";
  });
  table.closest(".scroll").before(label, told);
}

for (const block of document.querySelectorAll(".replay")) copying(block);
for (const table of document.querySelectorAll("table[data-filter]")) {
  sortable(table);
  if (table.tBodies[0].rows.length > 12) filterable(table);
}

// A night that is still running renews its page. A reader who has scrolled down is not disturbed.
const renewed = document.querySelector("[data-renewed]");
if (renewed) {
  const STALE = 15 * 60 * 1000;
  const age = () => Date.now() - Date.parse(renewed.dataset.renewed);
  setInterval(() => {
    if (age() > STALE) {
      document.getElementById("word").textContent = "Stopped?";
      renewed.textContent = `Not renewed for ${Math.round(age() / 60000)} minutes: a part takes long, or the night was killed.`;
    }
    if (scrollY < 100 && !document.querySelector("dialog[open]")) location.reload();
  }, 15000);
}
