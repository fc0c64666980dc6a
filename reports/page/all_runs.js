"use strict";
// Optional: adds a filter, the ages of runs, and links from bars to runs.
const PART = 200;
const form = document.getElementById("filter"), list = document.getElementById("list");
const rows = [...list.tBodies[0].rows];
const texts = rows.map((row) => row.textContent.toLowerCase());
const told = form.querySelector(".told");
const more = document.getElementById("more");
let shown = PART;

function holds(row, i, wanted) {
  return (!wanted.q || texts[i].includes(wanted.q.toLowerCase()))
    && ["verdict", "kind", "device"].every((name) => !wanted[name] || row.dataset[name] === wanted[name])
    && (!wanted.commit || row.dataset.commit.startsWith(wanted.commit.toLowerCase().slice(0, 10)))
    && (!wanted.changed || "changed" in row.dataset);
}

function values() {
  return Object.fromEntries([...new FormData(form)].filter(([, value]) => value));
}

// Later rows are drawn on demand: two thousand rows would take a phone a second.
function draw() {
  const wanted = values();
  let found = 0;
  rows.forEach((row, i) => {
    const good = holds(row, i, wanted);
    found += good;
    row.hidden = !good || found > shown;
  });
  told.textContent = `${found.toLocaleString("en")} of ${rows.length.toLocaleString("en")} runs`;
  more.parentElement.hidden = found <= shown;
}

// The filter is part of the URL, so that it can be shared.
function change() {
  shown = PART;
  const wanted = new URLSearchParams(values()).toString();
  history.replaceState(null, "", wanted ? `#all?${wanted}` : location.pathname);
  draw();
}

function show(row) {
  if (row.hidden) {
    form.reset();
    shown = rows.length;
    draw();
  }
  row.scrollIntoView({ block: "center" });
  history.replaceState(null, "", `#${row.id}`);
  for (const other of list.querySelectorAll(".target")) other.classList.remove("target");
  row.classList.add("target");
}

// Take the filter from the URL; a run that the URL names is shown wherever it is in the list.
function follow() {
  const [place, asked] = location.hash.slice(1).split("?");
  if (place === "all" && asked) {
    for (const [name, value] of new URLSearchParams(asked)) {
      const control = form.elements.namedItem(name);
      if (!control) continue;
      if (control.type === "checkbox") control.checked = true;
      else control.value = value;
    }
    document.getElementById("all").scrollIntoView();
  }
  draw();
  const row = place.startsWith("run-") && document.getElementById(place);
  if (row) show(row);
}

function age(time) {
  const hours = (Date.now() - Date.parse(time.dateTime)) / 3.6e6;
  if (!(hours >= 0)) return;
  const text = hours < 48 ? `${Math.round(hours)} hours` : `${Math.round(hours / 24).toLocaleString("en")} days`;
  time.append(` (${text} ago)`);
}

form.hidden = false;
form.addEventListener("input", change);
form.addEventListener("reset", () => setTimeout(change));
form.addEventListener("submit", (event) => event.preventDefault());
more.addEventListener("click", () => {
  shown += PART;
  draw();
});
for (const bar of document.querySelectorAll(".strip [data-run]")) {
  const row = document.getElementById(bar.dataset.run);
  if (row) bar.addEventListener("click", () => show(row));
}
for (const time of document.querySelectorAll("[data-age]")) age(time);
addEventListener("hashchange", follow);
follow();
