"use strict";

// Sorts rows within their band. A third click restores the initial order. Rows without a value come last.
for (const button of document.querySelectorAll("table.rows thead button")) {
  const head = button.closest("th");
  const table = head.closest("table");
  const bodies = [...table.tBodies].map((body) => ({ body, rows: [...body.querySelectorAll("tr.row")] }));
  button.addEventListener("click", () => {
    const first = button.dataset.first;
    const second = first === "ascending" ? "descending" : "ascending";
    const next = { none: first, [first]: second, [second]: "none" }[head.getAttribute("aria-sort")];
    for (const other of table.tHead.querySelectorAll("[aria-sort]")) other.setAttribute("aria-sort", "none");
    head.setAttribute("aria-sort", next);
    const place = head.cellIndex;
    const value = (row) => row.cells[place].dataset.sort;
    for (const { body, rows } of bodies) {
      body.append(...(next === "none" ? rows : [...rows].sort((a, b) => compare(value(a), value(b), next))));
    }
  });
}

function compare(a, b, direction) {
  if (a === "" || b === "") return (a === "") - (b === "");
  const order = isNaN(a) || isNaN(b) ? a.localeCompare(b, "en") : a - b;
  return direction === "ascending" ? order : -order;
}

// Filters groups by the fields that their runs share, and rows by family, machine and text. The URL holds the filters,
// so that a view can be shared.
const form = document.getElementById("filters");
if (form) {
  const groups = [...document.querySelectorAll("section.group")];
  const count = (rows) => new Set([...rows].map((row) => row.dataset.run)).size; // the full cache appears in every table
  const every = count(document.querySelectorAll("section.group .row"));

  const apply = () => {
    const wanted = Object.fromEntries([...new FormData(form)].filter(([, value]) => value));
    const words = (wanted.find || "").toLowerCase().split(/\s+/).filter(Boolean);
    let rows = 0;
    let tables = 0;
    for (const group of groups) {
      const right = Object.entries(wanted).every(([key, value]) => !(key in group.dataset) || group.dataset[key] === value);
      const about = `${group.dataset.model} ${group.dataset.task} ${group.dataset.suite}`.toLowerCase();
      for (const row of group.querySelectorAll(".row")) {
        const text = `${row.dataset.find} ${about}`;
        row.hidden = !(right && ["family", "machine"].every((x) => !wanted[x] || row.dataset[x] === wanted[x]) && words.every((x) => text.includes(x)));
      }
      const here = count(group.querySelectorAll(".row:not([hidden])"));
      for (const part of group.querySelectorAll("tbody, .scroll, ul.plain")) part.hidden = !part.querySelector(".row:not([hidden])");
      group.hidden = !here;
      const entry = document.querySelector(`[data-group="${group.id}"]`);
      if (entry) entry.hidden = group.hidden;
      rows += here;
      tables += here > 0;
    }
    document.getElementById("shown").textContent = `${rows} of ${every} runs, in ${tables} of ${groups.length} protocols. Filters do not change ranks.`;
    document.getElementById("nothing").hidden = rows > 0;
    const address = new URLSearchParams(wanted).toString();
    if (address || location.hash.includes("=")) history.replaceState(null, "", address ? `#${address}` : location.pathname + location.search);
  };

  const read = () => {
    if (location.hash.includes("=")) { // not the anchor of a table
      const wanted = new URLSearchParams(location.hash.slice(1));
      for (const element of form.elements) if (element.name) element.value = wanted.get(element.name) ?? "";
      apply();
    }
  };

  form.addEventListener("input", apply);
  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("reset", () => setTimeout(apply));
  document.getElementById("again").addEventListener("click", () => form.reset());
  addEventListener("hashchange", read);
  const filters = document.getElementById("filtering");
  filters.hidden = false;
  filters.open = matchMedia("(min-width: 44rem)").matches; // closed on narrow screens
  if (location.hash.includes("=")) read();
  else apply();
}
