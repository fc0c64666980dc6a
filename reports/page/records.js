// Every row of the run, unpacked on first use: filter, sort, pages, details, download.
// All data are inserted as text, except drill-downs: markup made by the page's own templates.
const explorer = (() => {
  const PAGE = 25;
  const GAP = "\u2013"; // an en dash, as in the tables of the page
  const section = document.getElementById("records");
  const form = section.querySelector("form");
  const table = section.querySelector("table");
  const told = section.querySelector("[role=status]");
  const pages = section.querySelector(".pages");
  const fresh = () => ({ q: "", verdict: "", suite: "", sort: "", page: 1 });
  let state = fresh(), data = null, loading = null;

  async function unpack() {
    const packed = section.querySelector("template").content.textContent.trim();
    const bytes = Uint8Array.from(atob(packed), (c) => c.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    return JSON.parse(await new Response(stream).text());
  }

  function load() {
    loading ??= unpack().then(index).catch((error) => {
      told.textContent = `The rows could not be unpacked by this browser: ${error.message}`;
      throw error;
    });
    return loading;
  }

  // Columns become functions of the row index: names are looked up, and strings become numbers.
  function index(packed) {
    const of = {};
    for (const [name, column] of Object.entries(packed.columns)) {
      const at = Array.isArray(column) ? (i) => column[i] : (i) => column.names[column.at[i]];
      of[name] = name === "value" || name === "tolerance" ? (i) => Number(at(i)) : at;
    }
    const all = packed.columns.id.map((_, i) => i);
    const words = (i) => [of.suite(i), of.case(i), edge(i), of.quantity(i), metric(i), of.note(i)];
    const edge = (i) => packed.edges[of.edge(i)] ?? of.edge(i);
    const metric = (i) => packed.metrics[of.metric(i)];
    const text = all.map((i) => words(i).join(" ").toLowerCase());
    data = { ...packed, of, all, edge, metric, text, used };
    function used(i) {
      const [value, tolerance] = [of.value(i), of.tolerance(i)];
      if (Number.isNaN(tolerance)) return NaN;
      return tolerance === 0 ? (value === 0 ? 0 : Infinity) : value / tolerance;
    }
    return data;
  }

  function number(value) {
    if (Number.isNaN(value)) return "NaN";
    if (!Number.isFinite(value)) return value > 0 ? "Inf" : "-Inf";
    return value === 0 ? "0" : value.toExponential(1).replace(/e([+-])(\d)$/, "e$10$2");
  }

  function share(value) {
    if (!Number.isFinite(value)) return number(value);
    if (value >= 1e4) return `${number(value)}×`;
    if (value >= 10) return `${Math.round(value).toLocaleString("en")}×`;
    const percent = 100 * value;
    if (percent > 0 && percent < 0.1) return "<0.1 %";
    return `${percent.toFixed(percent >= 10 || percent === 0 ? 0 : 1)} %`;
  }

  // NaN sorts as the largest value, a missing value as the smallest.
  const heavy = (value, given) => (Number.isNaN(value) ? (given ? Infinity : -Infinity) : value);
  const KEYS = {
    quantity: (i) => data.of.quantity(i),
    case: (i) => data.of.case(i),
    edge: (i) => data.edge(i),
    metric: (i) => data.metric(i),
    value: (i) => heavy(data.of.value(i), true),
    tolerance: (i) => heavy(data.of.tolerance(i), false),
    used: (i) => heavy(data.used(i), !Number.isNaN(data.of.tolerance(i))),
  };

  function chosen() {
    const { of, text, all } = data, words = state.q.toLowerCase().split(/\s+/).filter(Boolean);
    const kept = all.filter((i) =>
      (state.verdict ? of.verdict(i) === state.verdict : data.columns.id[i] !== "") &&
      (!state.suite || of.suite(i) === state.suite) && words.every((word) => text[i].includes(word)));
    const [name, down] = [state.sort.replace("-", ""), state.sort.startsWith("-")];
    if (!KEYS[name]) return kept;
    const key = new Map(kept.map((i) => [i, KEYS[name](i)]));
    const order = (a, b) => (key.get(a) < key.get(b) ? -1 : key.get(a) > key.get(b) ? 1 : a - b);
    return kept.sort(down ? (a, b) => order(b, a) : order);
  }

  function el(tag, properties, ...children) {
    const element = Object.assign(document.createElement(tag), properties);
    element.append(...children.filter((child) => child !== null));
    return element;
  }

  const MARKS = { pass: "✓", fail: "✕", "not comparable": "≠", info: "", warning: "!" };
  const slug = (verdict) => (verdict === "not comparable" ? "blocked" : verdict);

  function mark(verdict) {
    const word = slug(verdict);
    return el("span", { className: `state ${word}` }, MARKS[verdict] ?? "", el("span", { className: "sr" }, ` ${word}`));
  }

  function name(text) {
    const code = el("code", {}, el("bdi", {}));
    text.split(/(?<=[./])/).forEach((part, i) => code.firstChild.append(...(i ? [el("wbr", {})] : []), part));
    return code;
  }

  function usage(i) {
    const value = data.used(i);
    if (Number.isNaN(data.of.tolerance(i))) return GAP;
    const fill = el("span", {});
    fill.style.width = `${Number.isFinite(value) ? Math.min(100, Math.max(0, 100 * value)) : 100}%`;
    const bar = el("span", { className: `bar ${slug(data.of.verdict(i))}` }, fill);
    bar.setAttribute("aria-hidden", "true");
    return el("span", { className: "used" }, bar, el("span", { className: "num" }, share(value)));
  }

  function row(i) {
    const { of } = data, id = data.columns.id[i];
    const limit = of.tolerance(i);
    const button = el("button", { type: "button" }, "Details", el("span", { className: "sr" }, ` of ${of.quantity(i)}`));
    button.setAttribute("aria-expanded", "false");
    const head = el("th", { scope: "row" }, el("span", { className: "pair" }, mark(of.verdict(i)), name(of.quantity(i))));
    const cells = [
      el("td", {}, el("bdi", {}, of.case(i))), el("td", { className: "words" }, el("bdi", {}, data.edge(i) || of.suite(i))),
      el("td", { className: "words" }, data.metric(i)), el("td", { className: "n" }, number(of.value(i))),
      el("td", { className: "n" }, Number.isNaN(limit) ? GAP : number(limit)), el("td", {}, usage(i)),
      el("td", {}, button),
    ];
    const line = el("tr", id ? { id: `r-${id}` } : {}, head, ...cells);
    button.addEventListener("click", () => unfold(line, i, button));
    return line;
  }

  function unfold(line, i, button) {
    const open = button.getAttribute("aria-expanded") !== "true";
    button.setAttribute("aria-expanded", String(open));
    if (!open) return line.nextElementSibling.remove();
    const cell = el("td", { colSpan: line.cells.length }, ...details(i));
    line.after(el("tr", { className: "detail" }, cell));
  }

  function details(i) {
    const { of, columns } = data, id = columns.id[i], limit = of.tolerance(i);
    const pairs = [
      ["value", String(of.value(i))], ["tolerance", Number.isNaN(limit) ? "none" : String(limit)],
      ["suite", of.suite(i)], ["dtype", of.dtype(i)], ["device", of.device(i)], ["note", of.note(i)],
      ...data.all.filter((k) => k !== i && !columns.id[k] && ["case", "edge", "quantity"].every((c) => of[c](k) === of[c](i)))
        .map((k) => [data.metric(k), String(of.value(k))]),
    ].filter(([, value]) => value);
    const facts = el("dl", { className: "facts" },
      ...pairs.map(([key, value]) => el("div", {}, el("dt", {}, key), el("dd", {}, el("bdi", {}, value)))));
    const parts = [facts];
    if (data.trends[i]) parts.push(trend(data.trends[i], data.used(i)));
    if (data.tensors[i]) {
      const holder = el("div", {});
      holder.innerHTML = data.tensors[i];
      parts.push(holder);
    } else if (of.verdict(i) === "fail" && of.metric(i) === "rel_l2") {
      parts.push(el("p", { className: "muted" }, "Not described element by element: that is done for the tensors that fail first."));
    }
    const command = data.replay[of.case(i)];
    if (command) parts.push(copyable("Measure it again", command));
    if (id) parts.push(copyable("Link to this row", `${location.href.split("#")[0]}#r-${id}`));
    return parts;
  }

  function copyable(what, text) {
    const code = el("pre", { tabIndex: 0 }, el("code", {}, text));
    code.setAttribute("aria-label", what);
    const block = el("div", { className: "replay" }, el("p", {}, what), code);
    copying(block);
    return block;
  }

  // Share of the tolerance night by night, on a logarithmic scale; above the dashed line it is broken.
  function trend(levels, now) {
    const series = [...levels, Number.isFinite(now) ? Math.round(100 * Math.log10(Math.max(now, 1e-9))) : "x"];
    const finite = series.filter((v) => typeof v === "number");
    const [low, high] = [Math.min(-50, ...finite) - 20, Math.max(10, ...finite) + 20];
    const x = (i) => 44 + (590 * i) / (series.length - 1), y = (v) => 104 - (92 * (v - low)) / (high - low);
    const svg = node("svg", { viewBox: "0 0 640 124", class: "trend", role: "img" });
    const said = (v) => (v === "x" ? "not finite" : share(10 ** (v / 100)));
    svg.setAttribute("aria-label", `Share of the tolerance over ${series.length} nights, now ${said(series.at(-1))}`);
    let path = "", pen = "M";
    const marks = [];
    series.forEach((v, i) => {
      if (typeof v === "number") {
        path += `${pen}${x(i).toFixed(1)} ${y(v).toFixed(1)}`;
        pen = "L";
      } else pen = "M";
      if (v === null || (v !== "x" && v <= 0 && i < series.length - 1)) return;
      const at = `M${x(i).toFixed(1)} ${y(v === "x" ? high : v).toFixed(1)}`;
      const cross = v === "x" || v > 0;
      const shape = node("path", { class: cross ? "cross" : "now", d: `${at}${cross ? "m-3-3l6 6m0-6l-6 6" : "m-3 0a3 3 0 1 0 6 0a3 3 0 1 0-6 0"}` });
      shape.append(node("title", {}, `${data.nights[i] ?? "this run"}: ${said(v)}`));
      marks.push(shape);
    });
    svg.append(node("path", { class: "limit", d: `M44 ${y(0)}H634` }), node("path", { class: "line", d: path }), ...marks,
      node("text", { class: "axis end", x: 38, y: y(0) + 4 }, "100 %"),
      node("text", { class: "axis start", x: 44, y: 120 }, data.nights[0] ?? ""),
      node("text", { class: "axis end", x: 634, y: 120 }, "this run"));
    return el("figure", {}, el("figcaption", {}, "Share of the tolerance used, night by night"), svg);
  }

  function node(tag, attributes, ...children) {
    const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    element.append(...children);
    return element;
  }

  function draw() {
    const kept = chosen(), last = Math.max(1, Math.ceil(kept.length / PAGE));
    state.page = Math.min(Math.max(1, state.page), last);
    const first = (state.page - 1) * PAGE;
    table.tBodies[0].replaceChildren(...kept.slice(first, first + PAGE).map(row));
    told.textContent = kept.length ? `${kept.length.toLocaleString("en")} rows` : "No row matches; clear the filter to see all.";
    pages.hidden = last === 1;
    pages.querySelector("output").textContent = `Page ${state.page} of ${last}`;
    pages.querySelector("[name=previous]").disabled = state.page === 1;
    pages.querySelector("[name=next]").disabled = state.page === last;
    for (const head of table.tHead.rows[0].cells) {
      head.removeAttribute("aria-sort");
      if (head.dataset.key && state.sort.replace("-", "") === head.dataset.key)
        head.setAttribute("aria-sort", state.sort.startsWith("-") ? "descending" : "ascending");
    }
    return kept;
  }

  // The filter is part of the URL, so that a view can be shared.
  function remember() {
    const set = Object.entries(state).filter(([key, v]) => v && !(key === "page" && v === 1));
    const query = new URLSearchParams(set).toString();
    history.replaceState(null, "", query ? `#records?${query}` : "#records");
  }

  async function change(part) {
    state = { ...state, page: 1, ...part };
    await load();
    draw();
    remember();
  }

  function show() {
    for (const field of ["q", "verdict", "suite"]) form.elements[field].value = state[field];
    form.hidden = table.hidden = false;
    section.querySelector(".scroll").hidden = false;
  }

  async function open(hash) {
    const query = hash.match(/^#records\?(.*)$/), id = hash.match(/^#r-([0-9a-f]+)$/);
    if (!query && !id) return false;
    state = { ...fresh(), ...(query ? Object.fromEntries(new URLSearchParams(query[1])) : {}) };
    state.page = Number(state.page) || 1;
    await load();
    const place = id ? chosen().findIndex((i) => data.columns.id[i] === id[1]) : -1;
    if (place >= 0) state.page = Math.floor(place / PAGE) + 1;
    show();
    draw();
    const line = id && document.getElementById(`r-${id[1]}`);
    if (id && !line) told.textContent = `This run has no row ${id[1]}; here are all of them.`;
    if (line) {
      line.classList.add("target");
      line.querySelector("button").click();
      line.querySelector("button").focus({ preventScroll: true });
    }
    (line || section).scrollIntoView({ block: line ? "center" : "start" });
    return true;
  }

  function save(type, text, extension) {
    const link = el("a", { href: URL.createObjectURL(new Blob([text], { type })), download: `${section.dataset.run}.${extension}` });
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  }

  // RFC 4180; an apostrophe is put before texts that a spreadsheet would run as a formula.
  function field(value) {
    const text = typeof value === "string" ? value.replace(/^[=+@\t\r-]/, "'$&") : String(value);
    return /[",\r\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
  }

  async function download(kind) {
    await load();
    const names = Object.keys(data.columns);
    const records = data.all.map((i) => names.map((key) => data.of[key](i)));
    if (kind === "csv") {
      save("text/csv", [names, ...records].map((r) => r.map(field).join(",")).join("\r\n") + "\r\n", "csv");
      return;
    }
    // JSON has no NaN and no infinity: they stay strings.
    const plain = (v) => (typeof v === "number" && !Number.isFinite(v) ? String(v) : v);
    const rows = records.map((r) => Object.fromEntries(names.map((key, k) => [key, plain(r[k])])));
    save("application/json", JSON.stringify({ run: section.dataset.run, rows }), "json");
  }

  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("input", (event) => change({ [event.target.name]: event.target.value }));
  form.addEventListener("reset", () => change(fresh()));
  for (const kind of ["csv", "json"]) form.elements[kind].addEventListener("click", () => download(kind));
  for (const [key, step] of [["previous", -1], ["next", 1]])
    pages.querySelector(`[name=${key}]`).addEventListener("click", async () => {
      await change({ page: state.page + step });
      table.scrollIntoView({ block: "nearest" });
    });
  for (const head of table.tHead.querySelectorAll("[data-key]")) {
    const button = el("button", { type: "button" }, ...contents(head));
    head.append(button);
    button.addEventListener("click", () =>
      change({ sort: state.sort === `-${head.dataset.key}` ? head.dataset.key : `-${head.dataset.key}` }));
  }
  form.hidden = false;
  new IntersectionObserver(async (entries, observer) => {
    if (!entries.some((entry) => entry.isIntersecting)) return;
    observer.disconnect();
    await load();
    if (!table.hidden) return;
    // Keep the scroll position at a linked section below, which these rows push down.
    const place = document.getElementById(decodeURIComponent(location.hash.slice(1)));
    const there = place && Math.abs(place.getBoundingClientRect().top) < 100;
    show();
    draw();
    if (there) place.scrollIntoView();
  }, { rootMargin: "400px" }).observe(section);
  return { open, change, show, form, table };
})();
