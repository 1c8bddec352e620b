"use strict";

const $ = (id) => document.getElementById(id);
const listed = (text, number) => text.split(" ").includes(String(number));

// Sorts rows within their band. A third click restores the initial order. Rows without a value come last.
for (const button of document.querySelectorAll("table.rows thead button")) {
  const head = button.closest("th");
  const table = head.closest("table");
  button.addEventListener("click", () => {
    const first = button.dataset.first;
    const second = first === "ascending" ? "descending" : "ascending";
    const next = { none: first, [first]: second, [second]: "none" }[head.getAttribute("aria-sort")];
    for (const other of table.tHead.querySelectorAll("[aria-sort]")) other.setAttribute("aria-sort", "none");
    head.setAttribute("aria-sort", next);
    for (const body of table.tBodies) {
      const rows = [...body.querySelectorAll("tr.row")];
      for (const row of rows) row.dataset.place ??= rows.indexOf(row);
      const value = (row) => (next === "none" ? row.dataset.place : read(row.cells[head.cellIndex]));
      body.append(...rows.sort((a, b) => compare(value(a), value(b), next)));
    }
  });
}

function read(cell) {
  const shown = [...cell.querySelectorAll("[data-sort]")].find((part) => !part.hidden);
  return cell.dataset.sort ?? shown?.dataset.sort ?? "";
}

function compare(a, b, direction) {
  if (a === "" || b === "") return (a === "") - (b === "");
  const order = isNaN(a) || isNaN(b) ? a.localeCompare(b, "en") : a - b;
  return direction === "descending" ? -order : order;
}

// The address holds what is chosen, so that a view can be shared.
const forms = [$("question"), $("filters")].filter(Boolean);

function keep() {
  const chosen = forms.flatMap((form) => [...new FormData(form)].filter(([, value]) => value));
  const address = new URLSearchParams(chosen).toString();
  history.replaceState(null, "", address ? `#${address}` : location.pathname + location.search);
}

function recall() {
  if (!location.hash.includes("=")) return;
  const wanted = new URLSearchParams(location.hash.slice(1));
  for (const element of forms.flatMap((form) => [...form.elements])) {
    if (element.name && wanted.has(element.name)) {
      element.value = wanted.get(element.name);
      element.dataset.chosen = "";
    }
    if (element.tagName === "SELECT" && element.selectedIndex < 0) element.selectedIndex = 0;
  }
}

// Hides rows and curves that do not match family, machine, training and text. The full cache always stays.
function filter() {
  const wanted = Object.fromEntries($("filters") ? new FormData($("filters")) : []);
  const words = (wanted.find || "").toLowerCase().split(/\s+/).filter(Boolean);
  const right = (data) => ["family", "machine", "training"].every((x) => !wanted[x] || !(x in data) || data[x] === wanted[x])
    && words.every((x) => (data.find ?? "").includes(x));
  for (const figure of document.querySelectorAll("figure.panel")) {
    const curves = [...figure.querySelectorAll(".curve")];
    for (const curve of curves) curve.classList.toggle("gone", !right(curve.dataset));
    figure.hidden = (wanted.family && figure.dataset.family !== wanted.family) || curves.every((x) => x.classList.contains("gone"));
  }
  for (const row of document.querySelectorAll(".row")) {
    row.hidden = !row.classList.contains("full") && (!right(row.dataset) || "outside" in row.dataset);
  }
}

// A protocol's page.
function showProtocol() {
  filter();
  for (const part of document.querySelectorAll("tbody, ul.plain")) part.hidden = !part.querySelector(".row:not([hidden])");
  const names = (rows) => new Set([...rows].map((row) => row.dataset.run)).size; // the full cache appears in every table
  const shown = names(document.querySelectorAll(".row:not([hidden])"));
  $("shown").textContent = `${shown} of ${names(document.querySelectorAll(".row"))} runs. Filters do not change ranks.`;
  $("nothing").hidden = document.querySelector(".row:not(.full):not([hidden])") !== null;
}

// The first page: looks up the answer to the chosen question, and shows its runs in the table.
const data = $("answers") && JSON.parse($("answers").textContent);
const text = (number) => data.texts[number];

function fill(part, fields) {
  for (const [name, value] of Object.entries(fields)) {
    for (const node of part.querySelectorAll(`[data-field="${name}"]`)) node.textContent = text(value);
  }
}

function showAnswer() {
  const chosen = ["model", "limit", "turns", "task"].map((name) => $("question").elements[name]);
  const key = (indices) => indices.join(".");
  const now = () => chosen.map((x) => x.selectedIndex);
  const offered = (at) => Object.keys(data.answers).filter((x) => at.every((y, i) => y === Number(x.split(".")[i])));
  // The choices before leave some options open. A choice of the user stays while it is open; the others start anew.
  for (const i of [1, 2, 3]) {
    const open = new Set(offered(now().slice(0, i)).map((x) => x.split(".")[i]));
    for (const option of chosen[i].options) option.disabled = !open.has(String(option.index));
    const usual = (option) => (i === 2 ? option.index === data.usual[now()[0]] : option.defaultSelected);
    const free = [...chosen[i].options].filter((x) => !x.disabled);
    const first = free.find(usual) ?? free[0];
    const kept = "chosen" in chosen[i].dataset && !chosen[i].options[chosen[i].selectedIndex].disabled;
    if (!kept) chosen[i].selectedIndex = first.index;
  }
  const answer = data.answers[key(now())];
  $("answer").hidden = false;
  $("verdict").textContent = text(answer.verdict);
  $("command").textContent = text(answer.command);
  $("limits").replaceChildren(...answer.limits.map((x) => Object.assign(document.createElement("li"), { textContent: text(x) })));
  $("best").replaceChildren(...answer.best.map(showTechnique));
  showSummary(answer, ...now());
}

function showTechnique(technique) {
  const part = $("technique").content.cloneNode(true);
  fill(part, { label: technique.label, place: technique.place, leads: technique.leads, since: technique.since });
  part.querySelector("a").href = text(technique.page);
  const body = part.querySelector("tbody");
  technique.runs.forEach((number, i) => {
    const [values, interval] = data.runs[number];
    const fields = Object.fromEntries(data.fields.map((name, j) => [name, values[j]]));
    const line = $("evidence").content.cloneNode(true);
    fill(line, fields);
    line.querySelector("[data-field=protocol]").href = text(fields.group);
    line.querySelector("[data-field=score]").href = text(fields.page);
    if (!technique.led[i]) line.querySelector(".led").remove();
    if (interval) {
      line.querySelector(".span").setAttribute("d", `M${interval[0]} 5H${interval[2]}`);
      line.querySelector(".mean").setAttribute("d", `M${interval[1]} 0V10`);
    } else line.querySelector("svg").remove();
    body.append(line);
  });
  for (const head of part.querySelectorAll("th[data-column]")) { // columns without a value
    const cells = [...part.querySelectorAll(`[data-column="${head.dataset.column}"]`)];
    if (cells.slice(1).every((x) => x.textContent === "-")) for (const cell of cells) cell.remove();
  }
  for (const name of technique.missing) {
    const row = body.insertRow();
    row.append(Object.assign(document.createElement("th"), { scope: "row", textContent: text(name) }));
    Object.assign(row.insertCell(), { textContent: "no run within the limit", colSpan: 9, className: "quiet" });
  }
  return part;
}

function showSummary(answer, model, limit, turns, task) {
  const place = new Map(answer.order.map((x, i) => [text(x), i]));
  for (const section of document.querySelectorAll(".summary")) {
    section.hidden = section.dataset.model !== String(model);
    if (section.hidden) continue;
    for (const part of section.querySelectorAll("[data-at]")) part.hidden = !listed(part.dataset.at, limit);
    const heads = [...section.querySelectorAll("thead th")];
    const body = section.querySelector("table").tBodies[1];
    const filled = (i) => [...body.rows].some((row) => row.cells[i].querySelector(".cell:not([hidden])"));
    const used = heads.map(({ dataset }, i) => i === 0
      || (listed(dataset.turns, turns) && (task === 0 || listed(dataset.task, task)) && filled(i)));
    for (const row of section.querySelectorAll("tr")) {
      [...row.cells].forEach((cell, i) => (cell.hidden = !used[i]));
      if (!("label" in row.dataset)) continue;
      delete row.dataset.outside;
      if (!place.has(row.dataset.label)) row.dataset.outside = "";
    }
    for (const head of heads) if (head.hasAttribute("aria-sort")) head.setAttribute("aria-sort", "none");
    const rows = [...body.rows].sort((a, b) => (place.get(a.dataset.label) ?? 1e9) - (place.get(b.dataset.label) ?? 1e9));
    body.append(...rows);
    rows.forEach((row, i) => (row.dataset.place = i));
    filter();
    const shown = rows.filter((row) => !row.hidden).length;
    $("shown").textContent = `${shown} of ${rows.length} techniques, best first. The full cache is always shown.`;
  }
}

const show = data ? showAnswer : $("filters") ? showProtocol : null;
if (show) {
  for (const form of forms) {
    form.hidden = false;
    form.addEventListener("input", (event) => { event.target.dataset.chosen = ""; show(); keep(); });
    form.addEventListener("submit", (event) => event.preventDefault());
    form.addEventListener("reset", () => setTimeout(() => {
      for (const element of form.elements) delete element.dataset.chosen;
      show();
      keep();
    }));
  }
  $("again")?.addEventListener("click", () => $("filters").reset());
  addEventListener("hashchange", () => { recall(); show(); });
  recall();
  show();
}
