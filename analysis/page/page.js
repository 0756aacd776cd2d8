"use strict";
(() => {
  const { charts, runs } = JSON.parse(document.getElementById("content").textContent);
  const root = document.documentElement;
  const wantsDark = window.matchMedia("(prefers-color-scheme: dark)");
  const theme = () => root.dataset.theme || (wantsDark.matches ? "dark" : "light");

  // Every {by, of} becomes the value of the choice; nothing is computed here.
  const resolve = (value, choices) => {
    if (Array.isArray(value)) return value.map((part) => resolve(part, choices));
    if (value === null || typeof value !== "object") return value;
    if ("by" in value) return resolve(value.of[choices[value.by]], choices);
    return Object.fromEntries(
      Object.entries(value).map(([key, part]) => [key, resolve(part, choices)]),
    );
  };
  const shows = (trace, choices) =>
    Object.entries(trace.when || {}).every(
      ([name, values]) => !(name in choices) || values.includes(choices[name]),
    );

  const draw = (figure) => {
    const chart = charts[figure.dataset.chart];
    const narrow = figure.clientWidth < 560;
    const choices = { theme: theme(), room: narrow ? "narrow" : "wide" };
    for (const select of figure.querySelectorAll("select")) {
      choices[select.dataset.choice] = select.value;
    }
    const colours = getComputedStyle(root);
    const [page, ink, line] = ["--page", "--ink", "--line"].map((name) =>
      colours.getPropertyValue(name).trim(),
    );
    const own = resolve(chart.layout, choices);
    const axis = { gridcolor: line, linecolor: line, zeroline: false, automargin: true };
    // Few ticks with whole numbers: of 50 plotly would write a small 5.
    const log = { tickformat: "~g", nticks: 4 };
    const axisOf = (given) => ({ ...axis, ...(given.type === "log" ? log : {}), ...given });
    const traces = chart.traces
      .filter((trace) => shows(trace, choices))
      .map(({ when, ...trace }) => resolve(trace, choices));
    // Of traces that share an entry of the legend, the first that shows has it.
    const named = new Set();
    for (const trace of traces.filter((each) => each.legendgroup)) {
      trace.showlegend = !named.has(trace.legendgroup);
      named.add(trace.legendgroup);
    }
    const layout = {
      ...own,
      paper_bgcolor: page,
      plot_bgcolor: page,
      font: { color: ink, size: narrow ? 11 : 13, family: "system-ui, sans-serif" },
      xaxis: axisOf(own.xaxis),
      yaxis: axisOf(own.yaxis),
      margin: { l: 55, r: 15, t: 15, b: 45 },
      hovermode: "closest",
      hoverlabel: { align: "left" },
      legend: narrow || traces.length > 30
        ? { orientation: "h", yref: "container", y: 0, yanchor: "bottom", traceorder: "normal" }
        : { orientation: "v", traceorder: "normal" },
    };
    const place = figure.querySelector(".drawing");
    const bare = { responsive: true, displaylogo: false, displayModeBar: false };
    Plotly.react(place, traces, layout, bare).then(() => {
      figure.dataset.drawn = "yes";
      if (place.dataset.listens) return;
      place.dataset.listens = "yes";
      place.on("plotly_click", ({ points }) => {
        const behind = points.flatMap((point) => point.customdata || point.data.meta || []);
        if (behind.length) open(behind);
      });
    });
  };

  const drawOpen = (part) => {
    for (const figure of part.querySelectorAll("figure.chart")) {
      if (figure.offsetParent !== null) draw(figure);
    }
  };

  const runTable = (positions) => {
    const table = document.createElement("table");
    const head = table.createTHead().insertRow();
    for (const header of runs.headers) {
      const cell = document.createElement("th");
      cell.scope = "col";
      cell.className = "left";
      cell.textContent = header;
      head.append(cell);
    }
    const body = table.createTBody();
    for (const position of [...new Set(positions)].sort((a, b) => a - b)) {
      const row = body.insertRow();
      for (const text of runs.rows[position]) {
        const cell = row.insertCell();
        cell.className = "left";
        cell.textContent = text;
      }
    }
    return table;
  };
  const dialog = document.getElementById("runs");
  const open = (positions) => {
    const count = new Set(positions).size;
    document.getElementById("runs-title").textContent = count === 1 ? "The run" : `${count} runs`;
    dialog.querySelector(".scroll").replaceChildren(runTable(positions));
    dialog.showModal();
  };

  const toggleRuns = (button) => {
    const row = button.closest("tr");
    const isOpen = button.getAttribute("aria-expanded") === "true";
    button.setAttribute("aria-expanded", String(!isOpen));
    if (isOpen) {
      row.nextElementSibling.remove();
      return;
    }
    const behind = document.createElement("tr");
    behind.className = "behind";
    const cell = behind.insertCell();
    cell.colSpan = row.cells.length;
    const scroll = document.createElement("div");
    scroll.className = "scroll";
    scroll.tabIndex = 0;
    scroll.append(runTable(row.dataset.runs.split(",").map(Number)));
    cell.append(scroll);
    row.after(behind);
  };

  const sort = (button) => {
    const header = button.closest("th");
    const table = button.closest("table");
    const falls = header.getAttribute("aria-sort") === "ascending";
    for (const other of header.parentNode.cells) other.removeAttribute("aria-sort");
    header.setAttribute("aria-sort", falls ? "descending" : "ascending");
    const sign = falls ? -1 : 1;
    for (const shown of table.querySelectorAll("button.runs[aria-expanded=true]")) toggleRuns(shown);
    const key = (row) => row.cells[header.cellIndex];
    const order = (a, b) => {
      const [x, y] = [key(a), key(b)];
      const [p, q] = [x.dataset.sort, y.dataset.sort];
      // Rows without a number stay at the end, whichever way it goes.
      if (p !== undefined || q !== undefined) {
        if (p === undefined || q === undefined) return p === undefined ? 1 : -1;
        return sign * (Number(p) - Number(q));
      }
      return sign * x.textContent.trim().localeCompare(y.textContent.trim(), "en", { numeric: true });
    };
    const body = table.tBodies[0];
    body.append(...[...body.rows].sort(order));
  };

  document.addEventListener("click", (event) => {
    const button = event.target.closest("button");
    if (!button) return;
    if (button.matches(".runs")) toggleRuns(button);
    else if (button.matches(".sort")) sort(button);
    else if (button.id === "theme") {
      root.dataset.theme = theme() === "dark" ? "light" : "dark";
      drawOpen(document);
    } else if (button.id === "open-all" || button.id === "close-all") {
      for (const part of document.querySelectorAll("details.section")) {
        part.open = button.id === "open-all";
      }
    }
  });
  document.addEventListener("change", (event) => {
    const figure = event.target.closest("figure.chart");
    if (figure) draw(figure);
  });
  wantsDark.addEventListener("change", () => drawOpen(document));
  for (const part of document.querySelectorAll("details.section")) {
    part.addEventListener("toggle", () => part.open && drawOpen(part));
  }
  const follow = () => {
    const target = location.hash && document.getElementById(location.hash.slice(1));
    const part = target && target.closest("details.section");
    if (part) part.open = true;
  };
  window.addEventListener("hashchange", follow);
  follow();
  drawOpen(document);
})();
