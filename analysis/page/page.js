"use strict";
(() => {
  const { charts, runs } = JSON.parse(document.getElementById("content").textContent);
  const root = document.documentElement;
  const wantsDark = window.matchMedia("(prefers-color-scheme: dark)");
  const theme = () => root.dataset.theme || (wantsDark.matches ? "dark" : "light");

  // Texts of few values are written once, with their places.
  const column = (packed) => (Array.isArray(packed) ? packed : packed.at.map((n) => packed.of[n]));
  const rows = (table) => {
    const columns = Object.entries(table).map(([name, packed]) => [name, column(packed)]);
    const count = columns.length ? columns[0][1].length : 0;
    return Array.from({ length: count }, (_, n) =>
      Object.fromEntries(columns.map(([name, values]) => [name, values[n]])),
    );
  };
  const chosenIn = (figure) =>
    Object.fromEntries(
      [...figure.querySelectorAll("select")].map((select) => [select.dataset.choice, select.value]),
    );
  const shows = (chart, chosen) => (row) =>
    chart.rows.every((name) => !(name in row) || [row[name]].flat().includes(chosen[name]));

  // What has two forms, as colours have, shows that of the theme.
  const themed = (value) => {
    if (Array.isArray(value)) return value.map(themed);
    if (value === null || typeof value !== "object") return value;
    if ("dark" in value) return value[theme()];
    return Object.fromEntries(Object.entries(value).map(([key, part]) => [key, themed(part)]));
  };

  const style = (letters, width) => {
    const colours = getComputedStyle(root);
    const [page, ink, line] = ["--page", "--ink", "--line"].map((name) =>
      colours.getPropertyValue(name).trim(),
    );
    return {
      font: "system-ui, sans-serif",
      background: page,
      view: { stroke: null },
      axis: {
        labelColor: ink, titleColor: ink, domainColor: ink, tickColor: ink, gridColor: line,
        labelFontSize: 12, titleFontSize: 13, titleFontWeight: "normal",
      },
      legend: {
        orient: "bottom", direction: "horizontal", labelColor: ink, labelLimit: 500,
        titleColor: ink, titleFontWeight: "normal", titleFontSize: 12, labelFontSize: 12, symbolSize: 90, columns: Math.max(1, Math.floor(width / (7 * letters + 40))),
      },
      text: { fontSize: 11 },
      title: { color: ink, fontSize: 13 },
      aria: false,
    };
  };

  // Axes that a reader moves know no padding: marks on their ends would be cut.
  const widen = (layers, datasets) => {
    for (const name of ["x", "y"]) {
      const places = layers.flatMap(({ encoding }) => encoding[name] || []);
      const scale = places.find(({ type }) => type === "quantitative")?.scale;
      if (!scale?.padding) continue;
      const log = scale.type === "log";
      const [there, back] = log ? [Math.log, Math.exp] : [Number, Number];
      let [low, high] = [Infinity, -Infinity];
      for (const { data, encoding } of layers) {
        for (const { field } of [encoding[name], encoding[`${name}2`]].filter((each) => each?.field)) {
          for (const row of datasets[data.name]) {
            const value = row[field];
            if (value === null || (log && value <= 0)) continue;
            low = Math.min(low, value);
            high = Math.max(high, value);
          }
        }
      }
      if (low > high) continue;
      const room = 0.03 * (there(high) - there(low)) || (log ? 0.1 : Math.abs(high) || 1);
      const domain = [back(there(low) - room), back(there(high) + room)];
      for (const place of places) place.scale.domain = domain;
    }
  };

  // What moving a line asks of each of its points again is where it is, and no more: rows without
  // a place are left out before, and looks stay as they were drawn.
  const lighten = (spec) => {
    for (const { type, marks, encode } of spec.marks) {
      if (type === "group" && marks) lighten({ marks });
      if (type !== "line" && type !== "area") continue;
      const update = {};
      for (const [name, value] of Object.entries(encode.update)) {
        if (/^[xy]2?$/.test(name)) update[name] = Array.isArray(value) ? value.at(-1) : value;
      }
      Object.assign(encode, { enter: encode.update, update });
    }
    return spec;
  };

  const draw = (figure) => {
    const chart = charts[figure.dataset.chart];
    const chosen = chosenIn(figure);
    chart.data ||= Object.fromEntries(
      Object.entries(chart.tables).map(([name, table]) => [name, rows(table)]),
    );
    const spec = themed(chart.specs[chart.of_axes.map((name) => chosen[name]).join("|")]);
    const datasets = {};
    const named = new Set();
    for (const { data, encoding, mark } of spec.layer.filter(({ data }) => data.name !== "legend")) {
      let chosenRows = chart.data[data.name].filter(shows(chart, chosen));
      if (mark.type === "line" || mark.type === "area") {
        const [x, y] = [encoding.x.field, encoding.y.field];
        chosenRows = chosenRows.filter((row) => row[x] !== null && row[y] !== null);
      }
      const { datum } = encoding.stroke || encoding.color || {};
      for (const row of chosenRows) named.add(datum || row.series);
      datasets[data.name] = chosenRows;
    }
    const entries = chart.names.filter((name) => named.has(name));
    datasets.legend = entries.map((series) => ({ series }));
    for (const { encoding } of spec.layer) {
      for (const channel of Object.values(encoding)) {
        if (channel.legend?.symbolOpacity) channel.legend.values = entries;
      }
    }
    widen(spec.layer, datasets);
    for (const { mark } of spec.layer) if (mark.size) mark.size *= 2;
    const place = figure.querySelector(".drawing");
    const whole = {
      $schema: "https://vega.github.io/schema/vega-lite/v6.json",
      ...spec,
      datasets,
      width: place.clientWidth,
      height: chart.height ? 1.5 * chart.height : 340,
      autosize: { type: "fit-x", contains: "padding" },
      config: style(Math.max(0, ...entries.map((name) => name.length)), place.clientWidth),
    };
    // Expressions are interpreted: the policy of this page lets no text become a program.
    const options = { actions: false, ast: true, patch: lighten, logLevel: 1, renderer: "canvas", tooltip: { theme: theme() } };
    figure.dataset.drawn = "";
    vegaEmbed(place, whole, options).then(({ view }) => {
      figure.view?.finalize();
      figure.view = view;
      figure.dataset.drawn = "yes";
      let pressed;
      view.addEventListener("pointerdown", (event) => (pressed = [event.clientX, event.clientY]));
      view.addEventListener("click", (event, item) => {
        const [x, y] = pressed;
        if (Math.hypot(event.clientX - x, event.clientY - y) > 4) return; // it was moved
        const behind = item?.datum?.runs || nearest(view, event, spec.layer, datasets);
        if (behind?.length) open(behind);
      });
    });
  };

  // A line is thin: a click near one of its places, or near a point, means it.
  const nearest = (view, event, layers, datasets) => {
    const [left, top] = view.origin();
    const padding = view.padding();
    const corner = view.container().querySelector("canvas").getBoundingClientRect();
    const [x, y] = [view.scale("x"), view.scale("y")];
    let [found, least] = [null, 12];
    for (const { data, encoding } of layers.filter(({ mark }) => mark.type === "line")) {
      for (const row of datasets[data.name]) {
        const away = Math.hypot(
          x(row[encoding.x.field]) + corner.x + padding.left + left - event.clientX,
          y(row[encoding.y.field]) + corner.y + padding.top + top - event.clientY,
        );
        if (away < least) [found, least] = [row.runs, away];
      }
    }
    return found;
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
  let resized;
  window.addEventListener("resize", () => {
    clearTimeout(resized);
    resized = setTimeout(drawOpen, 200, document);
  });
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
