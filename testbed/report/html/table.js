// Sorts and filters every table of class "grown", and says what a figure's mark stands for. The state of the first such
// table stands behind the # of the address, so that a view can be linked: #q=int8&network=cable&sort=2&order=descending.
// #cell=ID is a row of its own, which the browser finds by itself.
"use strict";
const number = (text) => Number.parseFloat(text.replace(/^~/, ""));  // "~1.01x" is 1.01, and a sentence is no number
const compare = new Intl.Collator("en", { numeric: true }).compare;

function grow(table, linked) {
  const heads = [...table.tHead.rows[0].cells], body = table.tBodies[0], rows = [...body.rows];
  const plain = (cell) => [...cell.childNodes].map((part) => part.nodeName === "SMALL" ? "" : part.textContent).join("").trim();
  const texts = rows.map((row) => [...row.cells].map(plain));
  const words = rows.map((row) => row.textContent.toLowerCase());
  const form = document.createElement("form"), shown = document.createElement("output");
  form.className = "filters";
  form.addEventListener("submit", (event) => event.preventDefault());
  const field = (name, control) => {
    const label = document.createElement("label");
    label.append(name, control);
    form.append(label);
    control.addEventListener("input", () => apply(true));
    return control;
  };
  const search = field("words in a row", document.createElement("input"));
  search.type = "search";
  const chosen = new Map();
  heads.forEach((head, at) => {
    const values = [...new Set(texts.map((row) => row[at]))].filter((value) => value);
    if (!("choose" in head.dataset) || values.length < 2) return;
    const select = document.createElement("select");
    for (const value of ["", ...values.sort(compare)]) select.append(new Option(value || "all", value));
    chosen.set(head.dataset.choose, [at, field(head.dataset.choose, select)]);
  });
  shown.setAttribute("aria-live", "polite");
  form.append(shown);
  table.parentElement.before(form);

  let by = null, order = "none";
  function sort(at, way) {
    [by, order] = [at, way];
    heads.forEach((head, place) => head.setAttribute("aria-sort", place === at ? way : "none"));
    const places = rows.map((_, place) => place);
    if (way !== "none") {
      const numeric = heads[at].classList.contains("n"), sign = way === "descending" ? -1 : 1;
      const keys = texts.map((row) => numeric ? number(row[at] ?? "") : row[at] ?? "");
      places.sort((a, b) => {
        if (!numeric) return sign * compare(keys[a], keys[b]) || a - b;
        const lost = Number.isNaN(keys[a]) - Number.isNaN(keys[b]);  // what is unknown stands last either way
        return lost || sign * (keys[a] - keys[b]) || a - b;
      });
    }
    body.append(...places.map((place) => rows[place]));
  }
  function apply(save) {
    const wanted = search.value.toLowerCase().split(/\s+/);
    let count = 0;
    rows.forEach((row, place) => {
      const fits = wanted.every((word) => words[place].includes(word)) &&
        [...chosen.values()].every(([at, select]) => !select.value || texts[place][at] === select.value);
      row.hidden = !fits;
      count += fits;
    });
    shown.textContent = `${count} of ${rows.length} rows; a heading sorts`;
    if (!save || !linked) return;
    const state = new URLSearchParams();
    if (search.value) state.set("q", search.value);
    for (const [name, [, select]] of chosen) if (select.value) state.set(name, select.value);
    if (order !== "none") { state.set("sort", by); state.set("order", order); }
    history.replaceState(null, "", `#${state}`);
  }
  function restore() {
    const cell = location.hash.startsWith("#cell="), state = new URLSearchParams(cell ? "" : location.hash.slice(1));
    if (!linked || (location.hash && !cell && ![...state.values()].some((value) => value))) return;  // #table: a heading
    search.value = state.get("q") ?? "";
    for (const [name, [, select]] of chosen) select.value = state.get(name) ?? "";
    const at = Number(state.get("sort"));
    if (state.has("sort") && heads[at]) sort(at, state.get("order") === "descending" ? "descending" : "ascending");
    apply(false);
    if (cell) document.getElementById(location.hash.slice(1))?.scrollIntoView({ block: "center" });
  }
  heads.forEach((head, at) => {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...head.childNodes);
    head.append(button);
    button.addEventListener("click", () => {
      sort(at, by !== at || order === "none" ? "ascending" : order === "ascending" ? "descending" : "none");
      apply(true);
    });
  });
  sort(0, "none");
  apply(false);
  restore();
  if (linked) addEventListener("hashchange", restore);
}
document.querySelectorAll("table.grown").forEach((table, place) => grow(table, place === 0));

for (const figure of document.querySelectorAll("figure:has(.mark)")) {
  const said = document.createElement("p");
  said.className = "value";
  said.textContent = "Rest on a mark, or touch it, to read its value.";
  figure.querySelector(".wide").after(said);
  for (const kind of ["pointerover", "click"]) {
    figure.addEventListener(kind, (event) => {
      const title = event.target.closest(".mark")?.querySelector("title");
      if (title) said.textContent = title.textContent;
    });
  }
}
