// The numbers of a chart under the pointer, or under the arrow keys; charts of one page show the same step together.
(() => {
  const tip = document.getElementById("tip");
  const read = new WeakMap();
  let shown = [];

  const chartOf = svg => {
    if (!read.has(svg)) read.set(svg, JSON.parse(svg.dataset.hover));
    return read.get(svg);
  };
  const middle = row => (row[0] + row[1]) / 2;

  function nearest(rows, place) {
    let low = 0, high = rows.length - 1;
    while (low < high) {
      const half = (low + high) >> 1;
      if (middle(rows[half]) < place) low = half + 1; else high = half;
    }
    return low > 0 && place - middle(rows[low - 1]) <= middle(rows[low]) - place ? low - 1 : low;
  }

  function clear() {
    for (const svg of shown) {
      svg.querySelector(".rule").classList.remove("seen");
      const output = svg.closest("figure")?.querySelector("output");
      if (output) output.textContent = "";
    }
    shown = [];
    tip.hidden = true;
  }

  function mark(svg, row, silent) {
    const chart = chartOf(svg), rule = svg.querySelector(".rule");
    const x = chart.start + (middle(row) - chart.low) * chart.apart;
    rule.setAttribute("x1", x);
    rule.setAttribute("x2", x);
    rule.classList.add("seen");
    const output = svg.closest("figure")?.querySelector("output");
    const values = row.slice(2).filter(Boolean).slice(0, 2).map(value => value.split(" ")[0]);
    if (output && !silent) output.textContent = values.join(" · ");
    shown.push(svg);
  }

  function fill(chart, row) {
    const head = document.createElement("b");
    const place = row[0] === row[1] ? `${row[0]}` : `${row[0]} to ${row[1]}`;
    head.textContent = chart.unit ? `after ${place} ${chart.unit}` : `step${row[0] === row[1] ? "" : "s"} ${place}`;
    const lines = chart.names.map(([label, colour], index) => {
      const value = row[index + 2];
      if (!value) return "";
      const line = document.createElement("div");
      if (colour) line.append(Object.assign(document.createElement("i"), {className: colour}));
      line.append(Object.assign(document.createElement("span"), {textContent: `${label}: ${value}`}));
      return line;
    });
    tip.replaceChildren(head, ...lines.filter(Boolean));
  }

  function show(svg, index, left, top) {
    clear();
    const chart = chartOf(svg), row = chart.rows[index];
    mark(svg, row, true);
    for (const other of svg.closest("[data-together]")?.querySelectorAll("svg[data-hover]") ?? []) {
      if (other === svg || chartOf(other).unit !== chart.unit || !other.getClientRects().length) continue;
      const rows = chartOf(other).rows, near = rows[nearest(rows, middle(row))];
      if (near[0] <= row[1] && near[1] >= row[0]) mark(other, near, false);
    }
    fill(chart, row);
    tip.hidden = false;
    const side = left > window.innerWidth / 2 ? left - tip.offsetWidth - 14 : left + 14;
    tip.style.left = `${Math.max(4, Math.min(side, window.innerWidth - tip.offsetWidth - 4))}px`;
    tip.style.top = `${Math.max(4, Math.min(top - 10, window.innerHeight - tip.offsetHeight - 4))}px`;
  }

  function point(event) {
    const svg = event.target.closest?.("svg[data-hover]");
    if (!svg) {
      if (shown.length) clear();
      return;
    }
    const chart = chartOf(svg), box = svg.getBoundingClientRect();
    const x = (event.clientX - box.left) * svg.viewBox.baseVal.width / box.width;
    show(svg, nearest(chart.rows, chart.low + (x - chart.start) / chart.apart), event.clientX, event.clientY);
  }

  function step(event) {
    const svg = event.target.closest?.("svg[data-hover]");
    const by = {ArrowLeft: -1, ArrowRight: 1}[event.key];
    if (event.key === "Escape") clear();
    if (!svg || !by) return;
    event.preventDefault();
    const rows = chartOf(svg).rows, last = Number(svg.dataset.at ?? (by > 0 ? -1 : rows.length));
    const at = Math.max(0, Math.min(rows.length - 1, last + by));
    svg.dataset.at = at;
    const box = svg.getBoundingClientRect(), chart = chartOf(svg);
    const x = chart.start + (middle(rows[at]) - chart.low) * chart.apart;
    show(svg, at, box.left + x * box.width / svg.viewBox.baseVal.width, box.top + 10);
  }

  document.addEventListener("pointermove", point);
  document.addEventListener("pointerdown", point);
  document.addEventListener("pointerleave", clear);
  document.addEventListener("scroll", () => shown.length && clear(), {capture: true, passive: true});
  document.addEventListener("keydown", step);
  document.addEventListener("focusout", clear);
  document.addEventListener("fresh", clear);
  document.addEventListener("dblclick", event => event.target.closest?.(".charts > figure")?.classList.toggle("big"));
})();
