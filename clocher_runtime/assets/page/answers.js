// Answers: what is asked for, and what comes in.

import {events, faultOf, request} from './api.js';
import {jobs, state, viewOf} from './state.js';
import {add, messages, path} from './talk.js';

function asked(chat, turns) {
  const {settings} = chat;
  const number = (name) => (settings[name] ? Number(settings[name]) : undefined);
  const tools = settings.tools?.trim();
  const text = () => turns.map((turn) => turn.content).join('');
  const isText = chat.kind === 'text';
  return {
    ...isText ? {prompt: text()} : {messages: messages(turns, settings.system), tools: tools ? JSON.parse(tools) : undefined},
    stream: true,
    stream_options: {include_usage: true, continuous_usage_stats: true, include_canvas: true},
    temperature: number('temperature') ?? state.model.meta.sampling.temperature,
    top_p: number('top_p'),
    top_k: number('top_k'),
    min_p: number('min_p'),
    seed: number('seed'),
    max_tokens: number('max_tokens') ?? (isText ? 256 : undefined),
  };
}

// `page` is told: `begun`, `painted`, `grown` when it is worth keeping, `ended`.
export async function answer(chat, page) {
  const body = asked(chat, path(chat));
  const turn = add(chat, {role: 'assistant', content: '', reasoning: '', calls: [], tokens: 0, model: state.model.id});
  const job = {chat, turn, stop: new AbortController(), keptAt: performance.now()};
  jobs.set(chat.id, job);
  page.begun(job);
  try {
    const response = await request(chat.kind === 'text' ? 'v1/completions' : 'v1/chat/completions', body, job.stop.signal);
    for await (const event of events(response.body)) {
      if (event.error) throw faultOf(500, event.error);
      count(job, event);
      for (const choice of event.choices) take(job, choice);
      paintSoon(job, page);
    }
    if (turn.finish === 'length') turn.note = 'It ends here because the limit of tokens is reached.';
  } catch (error) {
    if (job.stop.signal.aborted) turn.note = 'Stopped.';
    else turn.fault = [error.message, error.advice ?? 'The page failed: reload it, then try again.'];
  }
  if (jobs.get(chat.id) !== job) return; // the chat was deleted
  jobs.delete(chat.id);
  page.ended(job);
}

// Takes what an event adds, of either API.
function take(job, {delta = {}, text, finish_reason: finish, canvas}) {
  const {turn} = job;
  if (canvas) job.canvas = canvas;
  if (delta.reasoning_content) {
    job.thinks ??= performance.now();
    turn.thought_s = (performance.now() - job.thinks) / 1000;
  }
  turn.reasoning += delta.reasoning_content ?? '';
  turn.content += delta.content ?? text ?? '';
  for (const {index, id, function: {name, arguments: given}} of delta.tool_calls ?? []) {
    if (id) turn.calls[index] = {id, name, arguments: ''};
    turn.calls[index].arguments += given ?? '';
  }
  if (finish) turn.finish = finish;
}

// Counts tokens, and how many come in a second after the first.
export function count(job, {usage, choices}) {
  const {turn} = job;
  const tokens = usage?.completion_tokens ?? turn.tokens + choices.length;
  if (usage) turn.context = usage.total_tokens;
  if (tokens <= turn.tokens) return;
  turn.run = tokens / (usage?.nfe ?? tokens - usage?.completion_tokens_details?.accepted_prediction_tokens);
  turn.tokens = tokens;
  job.first ??= {tokens, at: performance.now()};
  const seconds = (performance.now() - job.first.at) / 1000;
  if (seconds > 0.1) turn.rate = (tokens - job.first.tokens) / seconds;
}

// Everything that came between two frames is painted at once; painting takes a third of the time.
function paintSoon(job, page) {
  job.frame ||= requestAnimationFrame(() => {
    const now = performance.now();
    job.frame = 0;
    if (jobs.get(job.chat.id) !== job) return;
    if (now < job.restsUntil) return paintSoon(job, page);
    if (now > job.keptAt + 2000) {
      job.keptAt = now;
      page.grown(job);
    }
    const view = job.chat === state.chat && viewOf(job.turn);
    if (!view) return;
    view.unsure = job.canvas;
    view.paint();
    if (!(now < job.figuresAt + 250)) {
      job.figuresAt = now;
      view.showFoot();
      page.painted(job);
    }
    job.restsUntil = performance.now() + 2 * (performance.now() - now);
  });
}
