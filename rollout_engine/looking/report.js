// Of the page of an evaluation: charts and tables above its rollouts. page.html has what it calls.
function svg(tag, attributes, text) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  if (text !== undefined) element.textContent = shown(String(text));
  return element;
}
const COLOURS = ["#1f4fb4", "#b3420c", "#1b7a3d", "#7a3fa8", "#7d6200", "#00707a"];
const interval = row => row.low === null ? "" : ` [${number(row.low, 4)}, ${number(row.high, 4)}]`;
function chart(task, rows, checkpoints) {
  const settings = [...new Set(rows.map(row => row.setting))], W = 480, H = 240, LEFT = 52, BOTTOM = 34;
  const ends = rows.flatMap(row => [row.value, row.low ?? row.value, row.high ?? row.value]);
  let low = Math.min(...ends), high = Math.max(...ends);
  if (high === low) { low -= 0.5; high += 0.5; }
  const step = (W - LEFT - 16) / Math.max(1, checkpoints.length), y = v => 10 + (H - BOTTOM - 10) * (high - v) / (high - low);
  const x = row => LEFT + step * (checkpoints.indexOf(row.checkpoint) + 0.5) + (settings.indexOf(row.setting) - (settings.length - 1) / 2) * Math.min(8, step / (settings.length + 1));
  const picture = svg("svg", {viewBox: `0 0 ${W} ${H}`, role: "img", "aria-label": `${at("metric").value} of ${shown(task)} by checkpoint; the table has the numbers`});
  for (let i = 0; i <= 4; i++) {
    const value = low + (high - low) * i / 4;
    picture.append(svg("line", {x1: LEFT, x2: W, y1: y(value), y2: y(value), stroke: "#d5d5dc"}), svg("text", {x: LEFT - 6, y: y(value) + 4, "text-anchor": "end"}, number(value)));
  }
  const every = Math.ceil(checkpoints.length / 6);
  checkpoints.forEach((each, i) => {
    const label = each.length > 14 ? "…" + each.slice(-13) : each;
    if (i % every === 0) picture.append(svg("text", {x: LEFT + step * (i + 0.5), y: H - 12, "text-anchor": "middle"}, label));
  });
  settings.forEach((setting, i) => {
    const own = rows.filter(row => row.setting === setting), colour = COLOURS[i % COLOURS.length], dash = ["none", "6 3", "2 3"][Math.floor(i / COLOURS.length) % 3];
    picture.append(svg("polyline", {points: own.map(row => `${x(row)},${y(row.value)}`).join(" "), fill: "none", stroke: colour, "stroke-width": 1.5, "stroke-dasharray": dash}));
    for (const row of own) {
      const point = svg("circle", {cx: x(row), cy: y(row.value), r: 3.5, fill: colour});
      point.append(svg("title", {}, `${cell(row)}: ${number(row.value, 4)}${interval(row)}`));
      if (row.low !== null) picture.append(svg("line", {x1: x(row), x2: x(row), y1: y(row.low), y2: y(row.high), stroke: colour, "stroke-width": 1.5}));
      picture.append(point);
    }
  });
  const box = make("figure"), key = make("div", null, "key");
  settings.forEach((setting, i) => {
    const entry = make("span"), mark = make("i");
    mark.style.background = COLOURS[i % COLOURS.length];
    entry.append(mark, shown(setting));
    key.append(entry);
  });
  box.append(make("figcaption", task), picture, key);
  return box;
}
function table(title, columns, rows) {  // columns: [heading, value of a row, text of a row]
  let by = -1, falling = false;
  const box = make("div", null, "wide-table"), grid = make("table"), head = make("tr"), body = make("tbody");
  const fill = () => {
    const sorted = by < 0 ? rows : rows.slice().sort((a, b) => {
      const [p, q] = [a, b].map(columns[by][1]);
      return (p === q ? 0 : p === null || (q !== null && p < q) ? -1 : 1) * (falling ? -1 : 1);
    });
    body.replaceChildren(...sorted.map(row => {
      const line = make("tr");
      line.append(...columns.map(([, value, text]) => make("td", text ? text(row) : value(row))));
      return line;
    }));
    [...head.children].forEach((th, i) => th.setAttribute("aria-sort", i !== by ? "none" : falling ? "descending" : "ascending"));
  };
  columns.forEach(([heading], i) => {
    const th = make("th"), sort = make("button", heading);
    sort.onclick = () => { falling = by === i && !falling; by = i; fill(); };
    th.append(sort);
    head.append(th);
  });
  const top = make("thead");
  top.append(head);
  grid.append(top, body);
  box.append(grid);
  box.tabIndex = 0;
  box.setAttribute("role", "region");
  box.setAttribute("aria-label", title);
  fill();
  return box;
}
function reported() {
  const {table: all, differences, checkpoints} = data.report, metric = at("metric").value, rows = all.filter(row => row.metric === metric);
  at("charts").replaceChildren(...[...new Set(rows.map(row => row.task))].map(task => chart(task, rows.filter(row => row.task === task), checkpoints)));
  const column = key => [key, row => row[key]], value = [metric, row => row.value, row => number(row.value, 4) + interval(row)];
  const versions = ["versions", row => row.versions[0] ?? null, row => row.versions.length > 4 ? `${row.versions[0]} to ${row.versions.at(-1)}` : row.versions.join(", ")];
  at("tables").replaceChildren(folded("Estimates, with 95 % intervals over prompts", () => table("Estimates", [...CELL.map(column), value, column("num_prompts"), column("num_samples"), versions], rows), true));
  const compared = differences.filter(row => row.metric === metric), p = ["p", row => row.p_value, row => number(row.p_value, 4)];
  if (compared.length) at("tables").append(folded("Paired differences between checkpoints", () => table("Differences", [column("checkpoint"), ["minus", row => row.baseline], column("task"), column("setting"), ["difference", ...value.slice(1)], p, column("num_prompts")], compared), true));
}
if (data.report) {
  at("report").hidden = false;
  options("metric", [...new Set(data.report.table.map(row => row.metric))]);
  at("metric").onchange = reported;
  for (const key of CELL) options(key, [...new Set(samples.map(s => s.evaluation[key]))]);
  for (const key of [...CELL, "correct"]) at(key).parentElement.hidden = false;
  reported();
}
