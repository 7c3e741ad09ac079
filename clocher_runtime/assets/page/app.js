// The page: which chat is open, what is asked, what keys and buttons do.

import {answer} from './answers.js';
import {request} from './api.js';
import {$, amount, copy, icon, say, short, stored, toast, visible} from './dom.js';
import {showFiles} from './files.js';
import * as list from './list.js';
import {MENU, begin, isNarrow, setFields, showSide} from './menu.js';
import {completes, jobs, running, state, turns, viewOf} from './state.js';
import {load, onOtherTab, save} from './store.js';
import * as talk from './talk.js';
import {AnswerView, AskedView, TextView} from './turns.js';

const AT_ONCE = 30; // turns; older ones are shown when the reader comes near
const LEFT = 'Stopped: the page was left.';
const drafts = new Map(); // messages that were not sent, by chat
const draftOf = (chat) => (chat.turns.length ? chat.id : 'new');
const [log, input] = [$('log'), $('input')];

// Which chat is open: its id is the fragment of the address.

async function open() {
  const id = location.hash.slice(1);
  const found = jobs.get(id)?.chat ?? (id && await load(id).catch(() => null));
  if (id !== location.hash.slice(1)) return; // another one was opened meanwhile
  if (id && !found) history.replaceState(null, '', location.pathname);
  const {chat: left} = state;
  if (left) drafts.set(draftOf(left), [input.value, state.files]);
  state.chat = found || talk.newChat(state.model.meta.chat_template ? 'chat' : 'text', stored(localStorage, 'settings'));
  [input.value, state.files] = drafts.get(draftOf(state.chat)) ?? ['', []];
  drafts.delete(draftOf(state.chat));
  state.views.splice(0).forEach((view) => view.node.remove());
  setFields(state.chat.settings);
  for (const part of document.querySelectorAll('.chat')) part.hidden = completes();
  $('plain').hidden = !completes();
  $('max_tokens').placeholder = completes() ? '256' : 'no limit';
  draw();
  showFiles();
  list.draw();
  if (isNarrow()) showSide(false);
  state.follows = $('down').hidden = true;
  toEnd();
}

function restart() {
  if (location.hash) history.pushState(null, '', location.pathname);
  open();
  input.focus();
}

// Shows the last turns; those that are shown already stay.
function draw(count = Math.max(AT_ONCE, state.views.length)) {
  const {chat, model} = state;
  const path = turns();
  const acts = {chat, meta: model.meta, again, edit, pick, isBusy: running};
  const fresh = (turn) => new (turn.role === 'assistant' ? AnswerView : AskedView)(turn, acts);
  let views = path.length ? [path.at(-1)] : [];
  if (completes()) views = views.map(() => new TextView(path, acts));
  else views = path.slice(-count).map((turn) => viewOf(turn) ?? fresh(turn));
  for (const view of state.views) if (!views.includes(view)) view.node.remove();
  views.forEach((view, at) => {
    if ($('turns').children[at] !== view.node) $('turns').insertBefore(view.node, $('turns').children[at]);
    view.unfold?.(at === views.length - 1);
    view.node.classList.toggle('writing', running()?.turn === view.turn);
  });
  state.views = views;
  $('earlier').hidden = completes() || path.length <= views.length;
  $('talk').classList.toggle('busy', Boolean(running()));
  log.ariaBusy = String(Boolean(running()));
  showTitle();
  showContext(path.findLast((turn) => turn.context)?.context);
  expect();
}

function showTitle() {
  if (!state.chat) return;
  const title = state.chat.turns.length ? visible(talk.titleOf(state.chat)) : state.model.id;
  $('name').textContent = title;
  document.title = `${title} – Clocher`;
}

// What the next message is: a question, a text, or the result of a call.
function expect() {
  if (!state.chat) return; // the model is not known yet
  const path = turns();
  const call = talk.openCall(path);
  const more = completes() && path.length;
  let wanted = completes() ? 'Text to complete' : 'Message';
  if (more) wanted = 'More text, or only Enter to continue';
  if (call) wanted = `Result of ${visible(call.name)}`;
  input.placeholder = input.ariaLabel = wanted;
  $('attach').hidden = completes() || Boolean(call);
  $('send').title = $('send').ariaLabel = running() ? 'Stop' : 'Send';
  $('send').replaceChildren(icon(running() ? 'stop' : 'up'));
  $('send').disabled = !running() && !(input.value.trim() || state.files.length || call || more);
  input.style.height = 'auto';
  input.style.height = `${input.scrollHeight}px`;
}

async function keep(chat = state.chat) {
  const job = jobs.get(chat.id);
  const all = chat.turns.map((turn) => (turn === job?.turn ? {...turn, note: LEFT} : turn));
  await save(talk.headOf(chat), {...chat, turns: all}).catch((error) => toast(`This chat cannot be kept: ${error?.message ?? 'the store is full'}`));
}

// Keeps a chat that has changed, as the newest of the list.
async function changed(chat = state.chat) {
  chat.changed = Date.now();
  if (chat === state.chat && location.hash.slice(1) !== chat.id) history.replaceState(null, '', `#${chat.id}`);
  await keep(chat);
  await list.refresh();
}

// Asking.

// Shows a setting that cannot be sent.
function refused() {
  const bad = $('settings').querySelector('label:not([hidden])>:invalid');
  if (bad) $('settings').showModal();
  return bad && !bad.reportValidity();
}

function submit() {
  if (running() || $('send').disabled || refused()) return;
  const {chat, files} = state;
  const call = talk.openCall(turns());
  const content = input.value;
  if (call) talk.add(chat, {role: 'tool', call: call.id, name: call.name, content});
  else if (content.trim() || files.length) talk.add(chat, {role: 'user', content, files});
  input.value = '';
  state.files = [];
  showFiles();
  goOn();
}

// Asks the model, unless a call waits for its result.
function goOn() {
  state.follows = true;
  if (!talk.openCall(turns())) return answer(state.chat, page);
  draw();
  return changed();
}

function again(turn) {
  const {chat} = state;
  if (running() || refused()) return;
  if (turn.fault || !(turn.content || turn.calls.length)) talk.drop(chat, turn);
  else chat.tip = turn.parent;
  answer(chat, page);
}

// An edited turn is a new branch beside the old one.
function edit(turn, content) {
  const {chat} = state;
  if (running() || refused()) return;
  const {role, name, call, files, reasoning, calls, finish, model} = turn;
  if (completes()) talk.add(chat, {role: 'user', content}, null);
  else if (role === 'assistant') talk.add(chat, {role, content, reasoning, calls, finish, model, note: 'Edited.'}, turn.parent);
  else talk.add(chat, {role, content, name, call, files}, turn.parent);
  if (role !== 'assistant' && !completes()) return goOn();
  draw();
  return changed();
}

function pick(turn) {
  if (running()) return;
  talk.show(state.chat, turn);
  draw();
  viewOf(turn)?.node.querySelector('.branch button:enabled')?.focus();
  keep();
}

const page = {
  begun: () => {
    draw();
    toEnd();
    changed();
    say('Writing');
  },
  painted: ({turn}) => showContext(turn.context),
  grown: ({chat}) => keep(chat),
  ended: ({chat, turn}) => {
    changed(chat);
    if (chat !== state.chat) return;
    viewOf(turn).end();
    draw();
    say(turn.fault?.[0] ?? turn.note ?? `Done, ${turn.tokens} tokens`);
    if (state.follows) toEnd();
  },
};

function showContext(used) {
  const room = state.model.meta.context;
  $('context').hidden = !used;
  $('context').textContent = `${used?.toLocaleString()} of ${room.toLocaleString()} tokens`;
  $('context').style.setProperty('--used', `${100 * used / room}%`);
}

// Scrolling follows what is written until the reader scrolls up.

function toEnd() {
  log.scrollTop = log.scrollHeight;
}

const sizes = new ResizeObserver((entries) => {
  if (state.follows && (running() || entries.some((each) => each.target === log))) toEnd();
});
log.onscroll = () => {
  state.follows = log.scrollHeight - log.scrollTop - log.clientHeight < 40;
  $('down').hidden = state.follows;
};
$('down').onclick = () => {
  toEnd();
  input.focus();
};

function showEarlier() {
  const below = log.scrollHeight - log.scrollTop;
  draw(state.views.length + AT_ONCE);
  log.scrollTop = log.scrollHeight - below;
}
$('earlier').onclick = showEarlier;
const nearTop = new IntersectionObserver(([entry]) => entry.isIntersecting && !state.follows && showEarlier(), {root: log, rootMargin: '600px'});

$('turns').addEventListener('click', ({target}) => {
  if (target.matches('figure .copy')) copy(target, target.closest('figure').querySelector('code').textContent);
});

// Keys.

input.oninput = expect;
input.onkeydown = (event) => {
  if (event.key === 'Enter' && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    submit();
  }
};
document.onkeydown = (event) => {
  if (!state.chat || document.querySelector('dialog[open]')) return;
  const key = event.altKey ? event.code.replace('Key', '').toLowerCase() : event.key; // Alt+N writes ñ on a Mac
  const isTyping = event.target.matches('textarea, input');
  const command = event.ctrlKey || event.metaKey;
  const does = {
    Escape: () => (isNarrow() && !$('side').hidden ? showSide(false) : running()?.stop.abort()),
    '/': !isTyping && !command && (() => input.focus()),
    '?': !isTyping && !command && MENU.help,
    k: command && (() => {
      showSide(true);
      $('search').select();
    }),
    n: event.altKey && restart,
    b: event.altKey && (() => showSide($('side').hidden)),
  }[key];
  if (!does) return;
  if (key !== 'Escape') event.preventDefault();
  does();
};
$('send').onclick = () => {
  if (running()) running().stop.abort();
  else submit();
  input.focus();
};
addEventListener('pagehide', () => jobs.forEach((job) => keep(job.chat)));

// The beginning: which model is here, which chat was open.

async function learn() {
  for (;;) {
    try {
      state.model = (await (await request('v1/models')).json()).data[0];
      if (state.model.meta) return;
      $('wait').textContent = 'The model is being loaded';
    } catch ({message, advice}) {
      $('wait').textContent = `${message} ${advice}`;
    }
    await new Promise((resolve) => setTimeout(resolve, 1000));
  }
}

function showModel({id, meta}) {
  const room = `${meta.context.toLocaleString()} tokens of context`;
  const facts = (...parts) => parts.filter(Boolean).join(' · ');
  $('model').textContent = id;
  $('wait').textContent = facts(meta.device, meta.precision, room);
  $('facts').textContent = facts(id, meta.family, meta.precision, meta.device, `${meta.threads} threads`,
    `${amount(meta.bytes_per_token)} of weights a token`, meta.read_gbps && `reads ${short(meta.read_gbps)} GB/s`, room);
  $('temperature').placeholder = meta.sampling.temperature;
  $('top_p').placeholder = meta.sampling.top_p ?? 1;
}

begin({keep, restart, showTitle});
await learn();
showModel(state.model);
await open();
$('new').onclick = restart;
addEventListener('hashchange', open);
onOtherTab(async (id) => {
  await list.refresh();
  if (id === state.chat.id && !running()) open();
});
sizes.observe($('turns'));
sizes.observe(log);
nearTop.observe($('earlier'));
