// A link opens the fold that contains its target; single keys are shortcuts for the most common actions.
async function follow() {
  if (await explorer.open(location.hash)) return;
  const target = location.hash && document.getElementById(decodeURIComponent(location.hash.slice(1)));
  if (!target) return;
  for (let fold = target.closest("details"); fold; fold = fold.parentElement.closest("details")) fold.open = true;
  target.scrollIntoView();
}

const dialog = document.getElementById("keyboard");
const single = dialog.querySelector("input");

// Moves to the next or previous section.
function step(direction) {
  const sections = [...document.querySelectorAll("main section")];
  const read = sections.findLastIndex((section) => section.getBoundingClientRect().top < 40);
  const next = sections[Math.min(sections.length - 1, Math.max(0, Math.max(0, read) + direction))];
  next.scrollIntoView();
  history.replaceState(null, "", `#${next.id}`);
}

const KEYS = {
  "/": () => {
    explorer.show();
    explorer.change({});
    explorer.form.elements.q.focus();
  },
  f: async () => {
    await explorer.change({ q: "", suite: "", sort: "", verdict: "fail" });
    explorer.show();
    document.getElementById("records").scrollIntoView();
    explorer.table.querySelector("tbody button")?.focus();
  },
  j: () => step(1),
  k: () => step(-1),
  "?": () => dialog.showModal(),
};

document.addEventListener("keydown", (event) => {
  const typing = event.target.closest("input:not([type=checkbox]), select, textarea");
  if (event.ctrlKey || event.metaKey || event.altKey || dialog.open || typing || !single.checked) return;
  if (!Object.hasOwn(KEYS, event.key)) return;
  event.preventDefault();
  KEYS[event.key]();
});

// On a phone the list of sections would fill a screen between the verdict and the first failure.
const sections = document.querySelector("nav details"), narrow = matchMedia("(max-width: 40rem)");
const fold = () => (sections.open = !narrow.matches);
narrow.addEventListener("change", fold);
fold();

const opener = document.querySelector("[data-opens=keyboard]");
opener.hidden = false;
opener.addEventListener("click", () => dialog.showModal());
addEventListener("hashchange", follow);
follow();
