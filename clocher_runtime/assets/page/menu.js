// What is done with whole chats: the list at the side, the menu, settings.

import {$, download, store, stored, toast, visible} from './dom.js';
import * as list from './list.js';
import {jobs, state} from './state.js';
import {chats, load, remove, save} from './store.js';
import * as talk from './talk.js';

let page; // what the page does: `keep`, `restart`, `showTitle`

// A chat that is open or written to is the one in memory.
const chatOf = async (id) => (id === state.chat?.id ? state.chat : jobs.get(id)?.chat ?? load(id));

async function rename(id, title) {
  const chat = await chatOf(id);
  chat.title = title;
  await page.keep(chat);
  await list.refresh();
  page.showTitle();
}

async function discard(id) {
  const chat = await chatOf(id);
  jobs.get(id)?.stop.abort();
  jobs.delete(id);
  await remove(id);
  if (chat === state.chat) page.restart();
  await list.refresh();
  toast(`Deleted “${visible(talk.titleOf(chat))}”`, async () => {
    await save(talk.headOf(chat), chat);
    await list.refresh();
    location.hash = chat.id;
  });
}

async function importFiles(files) {
  let last = null;
  let number = 0;
  for (const file of files) {
    try {
      for (const chat of talk.fromJson(await file.text())) {
        await save(talk.headOf(chat), chat);
        last = chat;
        number += 1;
      }
    } catch ({message}) {
      return toast(`${file.name} cannot be imported: ${message}`);
    }
  }
  await list.refresh();
  if (last) location.hash = last.id;
  return toast(`Imported ${number === 1 ? 'one chat' : `${number} chats`}`);
}

const narrow = matchMedia('(max-width: 52rem)');
export const isNarrow = () => narrow.matches;

export function showSide(isOpen) {
  $('side').hidden = !isOpen;
  $('shade').hidden = !(isOpen && isNarrow());
  $('toggle').ariaExpanded = String(isOpen);
  if (isOpen && isNarrow()) $('search').focus();
  if (!isNarrow()) store(localStorage, 'side', isOpen);
}

const showUsualSide = () => showSide(!isNarrow() && (stored(localStorage, 'side') ?? true));

export const MENU = {
  rename: () => {
    showSide(true);
    list.edit(talk.headOf(state.chat));
  },
  markdown: () => download(`${talk.titleOf(state.chat)}.md`, talk.toMarkdown(state.chat), 'text/markdown'),
  json: () => download(`${talk.titleOf(state.chat)}.json`, talk.toJson([state.chat]), 'application/json'),
  delete: () => discard(state.chat.id),
  all: async () => download(`clocher-chats-${new Date().toISOString().slice(0, 10)}.json`, talk.toJson(await chats()), 'application/json'),
  import: () => $('load').click(),
  theme: () => {
    const {dataset} = document.documentElement;
    const usual = matchMedia('(prefers-color-scheme: dark)').matches ? 'dark' : 'light';
    const other = (dataset.theme || usual) === 'dark' ? 'light' : 'dark';
    dataset.theme = other === usual ? '' : other; // what the system says is not written down
    store(localStorage, 'theme', dataset.theme);
  },
  help: () => $('shortcuts').showModal(),
};
for (const [id, act] of Object.entries(MENU)) {
  $(id).onclick = () => {
    $('menu').hidePopover();
    act();
  };
}
$('menu').onbeforetoggle = () => {
  for (const id of ['rename', 'markdown', 'json', 'delete']) $(id).disabled = !state.chat?.turns.length;
};
$('load').onchange = async ({target}) => {
  await importFiles(target.files);
  target.value = '';
};
$('toggle').onclick = () => showSide($('side').hidden);
narrow.onchange = showUsualSide;
$('shade').onclick = () => showSide(false);

// Settings.

export function setFields(values) {
  for (const id of talk.FIELDS) $(id).value = values?.[id] ?? '';
  $('tools').oninput();
}

const fields = () => Object.fromEntries(talk.FIELDS.map((id) => [id, $(id).value]));

$('set').onclick = () => $('settings').showModal();
$('defaults').onclick = () => setFields();
$('usual').onclick = () => {
  store(localStorage, 'settings', fields());
  toast('New chats begin with these settings');
};
$('settings').onchange = () => { if (state.chat) state.chat.settings = fields(); };
$('settings').onclose = () => {
  if (!state.chat) return; // the model is not known yet
  state.chat.settings = fields();
  if (state.chat.turns.length) page.keep(state.chat);
};
$('tools').oninput = () => {
  let why = 'Functions is not a JSON list, such as [{"type": "function", "function": {…}}]';
  try {
    if (Array.isArray(JSON.parse($('tools').value.trim() || '[]'))) why = '';
  } catch ({message}) {
    why += `: ${message}`;
  }
  $('tools').setCustomValidity(why);
};

export function begin(given) {
  page = given;
  document.documentElement.dataset.theme = stored(localStorage, 'theme') ?? '';
  list.begin({rename, remove: discard, current: () => state.chat?.id ?? location.hash.slice(1), isWriting: (id) => jobs.has(id)});
  showUsualSide();
  list.refresh();
}
