/** Scheduled jobs: their next runs, their last results, and actions on them. */
import { html } from "./lib.js";
import { api } from "./api.js";
import { titleOf } from "./sidebar.js";
import { Waiting, sessionHash, timelineHash, useAction, useLoad, when } from "./views.js";

const EVERY = 5000;

export function View() {
  const { data, error, reload } = useLoad("jobs", EVERY);
  return html`<div class="view">
    <p class="lead">Messages that start a turn at a set time. Add one in a chat: “every Monday at 9, look at the garden”.</p>
    <${Waiting} data=${data} error=${error} />
    ${data && !data.jobs.length && html`<p class="hint">Nothing is scheduled.</p>`}
    ${data && html`<ul class="cards" aria-label="Jobs">${data.jobs.map((/** @type {any} */ job) =>
      html`<${Job} key=${job.id} job=${job} onDone=${reload} />`)}</ul>`}
  </div>`;
}

/** @param {{job: any, onDone: () => void}} props */
function Job({ job, onDone }) {
  const { run, error, isBusy } = useAction(onDone);
  /** @param {string} action */
  const act = (action) => run(() => api(`jobs/${encodeURIComponent(job.id)}`, { action }));
  const remove = () => confirm(`Remove the job “${job.name || job.message.slice(0, 60)}”?`) && act("remove");
  const { last } = job;
  return html`<li class="card">
    <p class="top"><span dir="auto">${job.name || job.message}</span>
      <span class=${`badge ${job.paused ? "is-warn" : "is-good"}`}>${job.paused ? "paused" : job.schedule}</span></p>
    ${job.name && html`<p dir="auto">${job.message}</p>`}
    <dl class="facts">
      <div><dt>Next</dt><dd>${job.paused ? "when it is resumed" : job.next_runs.map(when).join(" · ")}</dd></div>
      <div><dt>Session</dt><dd><a href=${sessionHash(job.session)} dir="auto">${titleOf(job.session)}</a></dd></div>
      ${job.deliver === "text" && html`<div><dt>Sends</dt><dd>its text, as a reminder</dd></div>`}
    </dl>
    ${last ? html`<p class="notice" dir="auto"><a href=${timelineHash(job.session, last.turn)}>Last run</a>, ${when(last.at)}:${" "}${last.reason === "answer" ? last.text : `${last.reason ?? "running"}. ${last.text}`}</p>`
      : html`<p class="notice">It has not run yet.</p>`}
    <p class="row">
      <button type="button" class="small" disabled=${isBusy} onClick=${() => act("run")}>Run now</button>
      <button type="button" class="small" disabled=${isBusy} onClick=${() => act(job.paused ? "resume" : "pause")}>
        ${job.paused ? "Resume" : "Pause"}</button>
      <button type="button" class="small danger" disabled=${isBusy} onClick=${remove}>Remove</button>
    </p>
    ${error && html`<p class="is-error" role="alert">${error}</p>`}
  </li>`;
}
