"use strict";
// The page is complete without this: it adds copying, filtering and sorting.
for (const block of document.querySelectorAll(".replay")) {
  const button = document.createElement("button");
  button.type = "button";
  button.textContent = "Copy";
  button.setAttribute("aria-label", "Copy command: " + block.querySelector("p").textContent);
  button.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(block.querySelector("code").textContent);
      button.textContent = "Copied";
    } catch {
      getSelection().selectAllChildren(block.querySelector("code"));
      button.textContent = "Selected";
    }
  });
  block.append(button);
}

const valueOf = (row, column) => row.cells[column].textContent.trim();

// Numbers sort by value with NaN and Inf as the worst, everything else as text.
function compare(a, b) {
  const [x, y] = [a, b].map((t) => (/^(NaN|Inf)/.test(t) ? Infinity : parseFloat(t)));
  if (Number.isNaN(x) || Number.isNaN(y)) return a.localeCompare(b);
  return x === y ? 0 : x - y;
}

function sortable(table) {
  const body = table.tBodies[0];
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...head.childNodes);
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
  input.addEventListener("input", () => {
    const wanted = input.value.toLowerCase();
    for (const row of table.tBodies[0].rows) {
      row.hidden = !row.textContent.toLowerCase().includes(wanted);
    }
  });
  table.closest(".scroll").before(label);
}

for (const table of document.querySelectorAll("table[data-filter]")) {
  sortable(table);
  if (table.tBodies[0].rows.length > 12) filterable(table);
}
