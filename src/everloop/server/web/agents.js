/** Sub-agents, as a tree below the sessions that started them, and runs of agent definitions. */
import { html } from "./lib.js";
import { titleOf } from "./sidebar.js";
import { Waiting, sessionHash, span, timelineHash, useLoad, when } from "./views.js";

const EVERY = 3000;
const STATES = /** @type {Record<string, [string, string]>} */ ({
  running: ["running", "is-good"], waiting: ["waiting", "is-warn"], failed: ["failed", "is-bad"], idle: ["done", ""],
});

/** @typedef {{key: string, parent: string, label: string, task: string, state: string, started_at: number, updated_at: number,
 *   definition: string}} Agent */

export function View() {
  const { data, error } = useLoad("agents", EVERY);
  const agents = /** @type {Agent[]} */ (data?.agents ?? []);
  const known = new Set(agents.map((one) => one.key));
  const roots = [...new Set(agents.filter((one) => !known.has(one.parent)).map((one) => one.parent))];
  return html`<div class="view">
    <p class="lead">Tasks that the agent has handed to sub-agents, and goals that programs run to their end. Each is a session with its own log.</p>
    <${Waiting} data=${data} error=${error} />
    ${data && !agents.length && html`<p class="hint">No sub-agent has worked yet.</p>`}
    <ul class="tree" aria-label="Sub-agents">${roots.map((root) => html`<li key=${root}>
      ${root ? html`<a href=${sessionHash(root)} dir="auto">${titleOf(root)}</a>` : "Runs of programs"}
      <${Branch} agents=${agents} parent=${root} /></li>`)}</ul>
  </div>`;
}

/** @param {{agents: Agent[], parent: string}} props */
function Branch({ agents, parent }) {
  const own = agents.filter((one) => one.parent === parent);
  if (!own.length) return null;
  return html`<ul>${own.map((one) => html`<li key=${one.key}>
    <p class="row"><a href=${sessionHash(one.key)} dir="auto">${one.label}</a>
      ${one.definition && one.definition !== one.label && html`<span class="badge">${one.definition}</span>`}
      <span class=${`badge ${STATES[one.state][1]}`}>${STATES[one.state][0]}</span>
      <span class="meta">${when(one.started_at)}, ${span(Math.max(one.updated_at - one.started_at, 0))}</span>
      <a class="meta" href=${timelineHash(one.key)}>Timeline</a></p>
    ${one.task !== one.label && html`<p class="meta" dir="auto">${one.task}</p>`}
    <${Branch} agents=${agents} parent=${one.key} /></li>`)}</ul>`;
}
