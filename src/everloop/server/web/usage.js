/** Usage and cost: a chart by day, and tables by session and by model. */
import { html, useState } from "./lib.js";
import { titleOf } from "./sidebar.js";
import { Waiting, money, number, sessionHash, useLoad } from "./views.js";

/** @typedef {{day: string, session: string, model: string, calls: number, input_tokens: number, cached_tokens: number,
 *   output_tokens: number, cost: number | null}} Used */
/** @typedef {{name: string, calls: number, input: number, cached: number, output: number, cost: number | null}} Sum */

const HEIGHT = 100;

/**
 * Sum the usage by one of its fields, largest first.
 * @param {Used[]} usage
 * @param {"day" | "session" | "model"} by
 * @returns {Sum[]}
 */
function sums(usage, by) {
  const found = new Map(/** @type {[string, Sum][]} */ ([]));
  for (const one of usage) {
    const sum = found.get(one[by]) ?? { name: one[by], calls: 0, input: 0, cached: 0, output: 0, cost: null };
    sum.calls += one.calls;
    sum.input += one.input_tokens;
    sum.cached += one.cached_tokens;
    sum.output += one.output_tokens;
    if (one.cost !== null) sum.cost = (sum.cost ?? 0) + one.cost;
    found.set(one[by], sum);
  }
  return [...found.values()].sort((a, b) => (b.cost ?? 0) - (a.cost ?? 0) || b.input + b.output - a.input - a.output);
}

export function View() {
  const [days, setDays] = useState("30");
  const { data, error } = useLoad(`usage?days=${days}`);
  return html`<div class="view">
    <p class="row"><label class="pick is-short">Since
      <select value=${days} onChange=${(/** @type {any} */ event) => setDays(event.target.value)}>
        ${[["7", "7 days ago"], ["30", "30 days ago"], ["90", "90 days ago"]].map(([value, words]) =>
          html`<option key=${value} value=${value} selected=${value === days}>${words}</option>`)}
      </select></label></p>
    <${Waiting} data=${data} error=${error} />
    ${data && (data.usage.length ? html`<${Usage} data=${data} days=${Number(days)} />` : html`<p class="hint">Nothing was used.</p>`)}
  </div>`;
}

/** @param {{data: any, days: number}} props */
function Usage({ data, days }) {
  const usage = /** @type {Used[]} */ (data.usage);
  const total = sums(usage.map((one) => ({ ...one, day: "all" })), "day")[0];
  const byDay = new Map(sums(usage, "day").map((one) => [one.name, one]));
  const hasMoney = total.cost !== null;
  const first = Date.parse(data.since);
  const names = Array.from({ length: days }, (_, index) => new Date(first + index * 86_400_000).toISOString().slice(0, 10));
  const values = names.map((name) => {
    const sum = byDay.get(name);
    return sum ? (hasMoney ? sum.cost ?? 0 : sum.input + sum.output) : 0;
  });
  const budget = hasMoney ? data.day_cost : data.day_tokens;
  const facts = [
    ["Model calls", number(total.calls)],
    ["Tokens in", number(total.input)],
    ["Cached", total.input ? `${Math.round((100 * total.cached) / total.input)} %` : "–"],
    ["Tokens out", number(total.output)],
    ["Cost", money(total.cost) || "no price known"],
    ["Daily budget", [data.day_tokens && `${number(data.day_tokens)} tokens`, data.day_cost && money(data.day_cost)].filter(Boolean).join(", ") || "none"],
  ];
  return html`<dl class="facts">${facts.map(([name, value]) => html`<div key=${name}><dt>${name}</dt><dd>${value}</dd></div>`)}</dl>
    <${Chart} names=${names} values=${values} budget=${budget} write=${hasMoney ? money : number} what=${hasMoney ? "Cost" : "Tokens"} />
    <${Table} title="By model" rows=${sums(usage, "model")} />
    <${Table} title="By session" rows=${sums(usage, "session").slice(0, 50)} isSessions />
    <details><summary>By day, in numbers</summary>
      <${Table} title="By day" rows=${[...byDay.values()].sort((a, b) => b.name.localeCompare(a.name))} /></details>`;
}

/** @param {{names: string[], values: number[], budget: number, write: (value: number) => string, what: string}} props */
function Chart({ names, values, budget, write, what }) {
  const most = Math.max(...values, 1e-9);
  const top = values.indexOf(Math.max(...values));
  const words = `${what} by day. Most on ${names[top]}: ${write(values[top])}.`;
  return html`<figure>
    <svg class="chart" viewBox="0 0 ${names.length * 10} ${HEIGHT}" preserveAspectRatio="none" role="img" aria-label=${words}>
      <line x1="0" x2=${names.length * 10} y1=${HEIGHT} y2=${HEIGHT} />
      ${values.map((value, index) => html`<rect key=${names[index]} x=${index * 10 + 1} width="8" y=${HEIGHT - (value / most) * (HEIGHT - 4)}
        height=${(value / most) * (HEIGHT - 4)}><title>${names[index]}: ${write(value)}</title></rect>`)}
      ${budget > 0 && budget <= most && html`<line class="gap" x1="0" x2=${names.length * 10} y1=${HEIGHT - (budget / most) * (HEIGHT - 4)} y2=${HEIGHT - (budget / most) * (HEIGHT - 4)} />`}
    </svg>
    <figcaption class="legend"><span>${names[0]}</span><span>${words}</span><span>${names[names.length - 1]}</span></figcaption>
  </figure>`;
}

/** @param {{title: string, rows: Sum[], isSessions?: boolean}} props */
function Table({ title, rows, isSessions = false }) {
  return html`<div class="scroll"><table class="data"><caption class="hidden">${title}</caption>
    <thead><tr><th scope="col">${title}</th><th scope="col" class="number">Calls</th><th scope="col" class="number">Tokens in</th>
      <th scope="col" class="number">Cached</th><th scope="col" class="number">Tokens out</th><th scope="col" class="number">Cost</th></tr></thead>
    <tbody>${rows.map((row) => html`<tr key=${row.name}>
      <td dir="auto">${isSessions ? html`<a href=${sessionHash(row.name)}>${titleOf(row.name)}</a>` : row.name}</td>
      <td class="number">${number(row.calls)}</td><td class="number">${number(row.input)}</td>
      <td class="number">${row.input ? Math.round((100 * row.cached) / row.input) : 0} %</td>
      <td class="number">${number(row.output)}</td><td class="number">${money(row.cost)}</td></tr>`)}</tbody></table></div>`;
}
