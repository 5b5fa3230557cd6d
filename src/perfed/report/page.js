"use strict";
(() => {
  const data = JSON.parse(document.getElementById("chart-data").textContent);
  const root = document.documentElement;
  const $ = (id) => document.getElementById(id);
  const KINDS = ["global", "personalized"];
  const KIND_NAMES = { global: "global", personalized: "personalized" };
  const STATISTICS = {
    mean: "mean over clients", weighted: "mean by held-out examples", worst: "worst client",
    p10: "10th percentile of clients", p90: "90th percentile of clients",
  };
  const SYMBOLS = ["circle", "square", "diamond", "triangle-up", "cross", "x", "star"];
  const FONT = 'system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", sans-serif';
  const hidden = new Set();

  // Plotly reads a little HTML, and formulas, in every text: names are shown as they are.
  const plain = (text) => String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;")
    .replace(/>/g, "&gt;").replace(/\$/g, "&#36;").replace(/\s+/g, " ");
  const style = (name) => getComputedStyle(root).getPropertyValue(name).trim();
  const color = (i) => style(`--c${i % 7}`);
  const faint = (hex, part) => hex + Math.round(255 * part).toString(16).padStart(2, "0");
  const number = (v) => v === null ? "not defined" : String(Number(v.toPrecision(4)));
  const score = (key) => data.scores.find((s) => s.key === key);
  const value = (id) => $(id) ? $(id).value : null;

  // A long name on several lines, none of them wider than so many letters.
  function wrapped(text, width) {
    const lines = [""];
    for (const word of String(text).split(" ")) {
      for (let part = word; part; part = part.slice(width)) {
        const piece = part.slice(0, width), line = lines[lines.length - 1];
        if (line && (line + " " + piece).length > width) lines.push(piece);
        else lines[lines.length - 1] = line ? `${line} ${piece}` : piece;
      }
    }
    return lines.map(plain).join("<br>");
  }

  function axis(title, more) {
    return {
      title: { text: title, standoff: 8, font: { color: style("--soft"), size: 13 } },
      gridcolor: style("--grid"), zerolinecolor: style("--line"), linecolor: style("--line"),
      tickfont: { color: style("--soft"), size: 12 }, automargin: true, ...more,
    };
  }

  function draw(id, traces, height, xaxis, yaxis, label, more) {
    const chart = $(id);
    chart.setAttribute("aria-label", label);
    const coarse = matchMedia("(pointer: coarse)").matches;
    return Plotly.react(chart, traces, {
      height, width: chart.clientWidth, xaxis, yaxis, showlegend: false,
      margin: { l: 12, r: 14, t: 14, b: 12 },
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      font: { family: FONT, size: 13, color: style("--text") },
      hoverlabel: {
        bgcolor: style("--panel"), bordercolor: style("--soft"),
        font: { family: FONT, size: 13, color: style("--text") }, namelength: -1, align: "left",
      },
      dragmode: coarse ? false : "zoom", hovermode: "closest", ...more,
    }, { displayModeBar: false, displaylogo: false, showTips: false });
  }

  function curves() {
    const against = data.axes.find((a) => a.key === value("curve-axis"));
    const key = value("curve-score"), shown = value("curve-kind");
    let statistic = value("curve-statistic");
    const tail = data.statistics[key][3];
    if (statistic === "tail") statistic = tail;
    $("curve-statistic").lastChild.textContent = tail === "p90" ? "90th percentile" : "10th percentile";
    const kinds = shown === "both" ? KINDS : [shown];
    const bounded = (v) => score(key).percent ? Math.min(Math.max(v, 0), 100) : v;
    const traces = [], ends = [];
    data.groups.forEach((group, i) => {
      const x = group.x[against.key];
      if (hidden.has(i) || !x) return;
      for (const kind of kinds) {
        if (!group.curves[key][kind]) continue;
        const [mean, half] = group.curves[key][kind][statistic];
        const name = kinds.length > 1 ? `${group.name}, ${KIND_NAMES[kind]}` : group.name;
        if (half) {
          const at = x.map((_, k) => k).filter((k) => mean[k] !== null && half[k] !== null);
          const back = [...at].reverse();
          traces.push({
            type: "scatter", mode: "lines", hoverinfo: "skip", line: { width: 0 },
            fill: "toself", fillcolor: faint(color(i), 0.16),
            x: [...at, ...back].map((k) => x[k]),
            y: [...at.map((k) => bounded(mean[k] + half[k])), ...back.map((k) => bounded(mean[k] - half[k]))],
          });
        }
        const interval = (k) => half && half[k] !== null ? ` ± ${number(half[k])}` : "";
        traces.push({
          type: "scatter", mode: x.length > 60 ? "lines" : "lines+markers", x, y: mean,
          line: { color: color(i), width: 2.25, dash: kinds.length > 1 && kind === "global" ? "dash" : "solid" },
          marker: { color: color(i), size: 6, symbol: SYMBOLS[i % SYMBOLS.length] },
          text: mean.map((v, k) => `<b>${plain(name)}</b><br>${plain(against.name)}: ${number(x[k])}` +
            `<br>${plain(score(key).name)}: ${number(v)}${interval(k)}`),
          hovertemplate: "%{text}<extra></extra>",
        });
        ends.push(`${name} ends at ${number(mean[mean.length - 1])}${interval(mean.length - 1)}`);
      }
    });
    const label = `Line chart: ${score(key).name} of the ${shown === "both" ? "global and personalized" : KIND_NAMES[shown]}` +
      ` models, ${STATISTICS[statistic]}, against ${against.name}. ${ends.join("; ")}.`;
    return draw("curves", traces, $("curves").clientWidth < 600 ? 330 : 460,
      axis(against.name, { rangemode: "tozero" }), axis(score(key).name), label);
  }

  // Groups are rows at 0, 1, 2, ... from the top, under their names.
  function rows(shown, width) {
    return axis("", {
      tickvals: shown.map((_, k) => k), range: [shown.length - 0.5, -0.5], showgrid: false,
      ticktext: shown.map((g) => wrapped(g.name, width < 600 ? 14 : 26)), zeroline: false,
      tickfont: { color: style("--text"), size: 12.5 }, fixedrange: true,
    });
  }

  function distribution() {
    const key = value("box-score"), traces = [], said = [];
    const shown = data.groups.map((g, i) => ({ ...g, i })).filter((g) => !hidden.has(g.i));
    shown.forEach((group, row) => KINDS.forEach((kind, k) => {
      const box = group.boxes[key][kind], at = row + (k ? 0.21 : -0.21), c = color(group.i);
      if (!box) return;
      const [low, q1, median, q3, high] = box.percentiles;
      traces.push({
        type: "scatter", mode: "markers", x: box.values,
        y: box.values.map((_, j) => at + ((((j + 1) * 0.618034) % 1) - 0.5) * 0.26),
        marker: { color: faint(c, 0.45), size: 4.5 },
        text: box.names.map((n, j) => `<b>${plain(n)}</b><br>${plain(group.name)}, ` +
          `${KIND_NAMES[kind]}: ${number(box.values[j])}`),
        hovertemplate: "%{text}<extra></extra>",
      }, {
        type: "box", orientation: "h", y: [at], lowerfence: [low], q1: [q1], median: [median],
        q3: [q3], upperfence: [high], mean: [box.mean], boxmean: true, width: 0.34,
        line: { color: c, width: 1.75 }, fillcolor: k ? faint(c, 0.3) : "rgba(0,0,0,0)",
        hoverinfo: "skip",
      });
      said.push(`${group.name}, ${KIND_NAMES[kind]}: median ${number(median)}, ` +
        `10th percentile ${number(low)}, 90th ${number(high)}`);
    }));
    return draw("distribution", traces, 90 + 82 * Math.max(shown.length, 2),
      axis(score(key).name, { zeroline: false }), rows(shown, $("distribution").clientWidth),
      `Box plots of the clients' ${score(key).name} after the last round. ${said.join("; ")}.`);
  }

  function gain() {
    const at = Number(value("gain-group") ?? 0), group = data.groups[at], { ranks, values, names } = group.gain;
    const clients = ranks.length ? ranks[ranks.length - 1] : 0;
    const unit = data.scores[0].percent ? " points" : "";
    const trace = {
      type: "bar", x: ranks, y: values, width: clients / Math.max(ranks.length, 1) * (clients > 80 ? 1 : 0.82),
      marker: { color: values.map((v) => style(v < 0 ? "--lose" : "--accent")), line: { width: 0 } },
      text: names.map((n, k) => `<b>${plain(n)}</b><br>${values[k] > 0 ? "+" : ""}${number(values[k])}${unit}`),
      hovertemplate: "%{text}<extra></extra>", textposition: "none",
    };
    return draw("gain", [trace], $("gain").clientWidth < 600 ? 300 : 380,
      axis("Clients, by gain", { zeroline: false, showgrid: false }),
      axis(`Gain${unit ? " (points)" : ""}`, { zerolinewidth: 1.5, zerolinecolor: style("--soft") }),
      `Bar chart: personalized minus global, client by client, of ${group.name}. ` +
        $("gain").dataset[`line${at}`]);
  }

  function labels() {
    const { few, names, labels: classes, values } = data.labels;
    const chart = $("labels"), width = chart.clientWidth;
    const height = Math.min(Math.max(140 + 22 * classes.length, 260), 900);
    const step = Math.ceil(names.length / Math.max((width - 90) / 34, 1));
    const ticks = names.map((_, k) => k).filter((k) => k % step === 0);
    const skip = Math.ceil(classes.length / (height / 16));
    const kept = classes.map((_, k) => k).filter((k) => k % skip === 0);
    const short = (text) => plain(text.length > 12 ? text.slice(0, 11) + "…" : text);
    const x = few
      ? axis("Clients", { tickvals: ticks, ticktext: ticks.map((k) => short(names[k])), range: [-0.7, names.length - 0.3] })
      : axis("Clients, by their commonest label", { showticklabels: false });
    const y = axis("Labels", {
      tickvals: kept, ticktext: kept.map((k) => short(classes[k])), range: [-0.6, classes.length - 0.4],
    });
    const note = (l, c) => `<b>${plain(names[c])}</b><br>label ${plain(classes[l])}: ` +
      (few ? `${values[l][c]} examples` : `${number(100 * values[l][c])} %`);
    let trace;
    if (few) {
      const held = values.flatMap((row, l) => row.map((v, c) => [v, c, l])).filter(([v]) => v > 0);
      const cell = Math.min((width - 80) / (names.length + 1), (height - 70) / (classes.length + 1), 34);
      const most = Math.max(...held.map(([v]) => v));
      trace = {
        type: "scatter", mode: "markers", x: held.map((h) => h[1]), y: held.map((h) => h[2]),
        marker: {
          size: held.map(([v]) => Math.max(Math.sqrt(v / most) * cell, 2.5)), color: style("--c0"),
          opacity: 0.85, line: { width: 0 },
        },
        text: held.map(([, c, l]) => note(l, c)), hovertemplate: "%{text}<extra></extra>",
      };
    } else {
      trace = {
        type: "heatmap", z: values, zmin: 0, colorscale: [[0, style("--panel")], [1, style("--c0")]],
        text: values.map((row, l) => row.map((_, c) => note(l, c))),
        hovertemplate: "%{text}<extra></extra>",
        colorbar: {
          thickness: 10, outlinewidth: 0, tickformat: ".0%", x: 1.01, xpad: 4,
          tickfont: { color: style("--soft"), size: 12 },
        },
      };
    }
    return draw("labels", [trace], height, x, y, chart.dataset.label);
  }

  function timing() {
    const parts = JSON.parse($("timing").dataset.parts), said = [];
    const traces = parts.map((part, p) => ({
      type: "bar", orientation: "h", y: data.groups.map((_, k) => k),
      x: data.groups.map((g) => g.timing[part] ?? 0), width: 0.55,
      marker: { color: color(p), line: { color: style("--panel"), width: 1 } },
      text: data.groups.map((g) => `<b>${plain(g.name)}</b><br>${plain(part)}: ${number(g.timing[part] ?? 0)} s`),
      hovertemplate: "%{text}<extra></extra>", textposition: "none",
    }));
    for (const g of data.groups) {
      said.push(`${g.name}: ` + parts.map((p) => `${p} ${number(g.timing[p] ?? 0)} s`).join(", "));
    }
    return draw("timing", traces, 90 + 44 * data.groups.length, axis("Seconds", { zeroline: false }),
      rows(data.groups, $("timing").clientWidth), `Stacked bars: seconds by part. ${said.join("; ")}.`,
      { barmode: "stack" });
  }

  const charts = { curves, distribution, gain, labels, timing };
  const drawn = Object.keys(charts).filter((id) => $(id));
  const drawAll = () => Promise.all(drawn.map((id) => charts[id]()));

  function legends() {
    for (const button of document.querySelectorAll(".legend button")) {
      button.setAttribute("aria-pressed", String(!hidden.has(Number(button.dataset.group))));
    }
  }
  document.addEventListener("click", (event) => {
    const button = event.target.closest(".legend button");
    if (!button) return;
    const i = Number(button.dataset.group);
    if (!hidden.delete(i)) hidden.add(i);
    legends();
    curves();
    distribution();
  });
  for (const select of document.querySelectorAll("select[data-chart]")) {
    select.addEventListener("change", () => charts[select.dataset.chart]());
  }
  $("only-differences")?.addEventListener("change", (event) => {
    $("settings").classList.toggle("only-differences", event.target.checked);
  });

  const dark = matchMedia("(prefers-color-scheme: dark)");
  const remembered = () => { try { return localStorage.getItem("perfed-theme"); } catch { return null; } };
  function theme(name) {
    root.dataset.theme = name;
    $("theme").textContent = name === "dark" ? "Light colors" : "Dark colors";
    return drawAll();
  }
  $("theme").addEventListener("click", () => {
    const name = root.dataset.theme === "dark" ? "light" : "dark";
    try { localStorage.setItem("perfed-theme", name); } catch { /* then it is not remembered */ }
    theme(name);
  });
  dark.addEventListener("change", () => remembered() || theme(dark.matches ? "dark" : "light"));
  // Paper is white.
  let before = null;
  addEventListener("beforeprint", () => { before = root.dataset.theme; theme("light"); });
  addEventListener("afterprint", () => before && theme(before));

  let width = innerWidth, waiting = 0;
  addEventListener("resize", () => {
    if (innerWidth === width) return;
    width = innerWidth;
    clearTimeout(waiting);
    waiting = setTimeout(drawAll, 120);
  });
  theme(root.dataset.theme).then(() => { root.dataset.drawn = String(drawn.length); });
})();
