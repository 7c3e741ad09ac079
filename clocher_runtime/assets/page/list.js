// The list of chats: newest first, searched, renamed, deleted.

import {$, el, icon, patch, visible} from './dom.js';
import {chats, heads} from './store.js';
import {textOf, titleOf} from './talk.js';

let shown = []; // heads, with a piece of the text where a search found one
let asked = 0;

// `acts`: what the page does: `rename`, `remove`, `current`, `isWriting`.
let acts;
export function begin(given) {
  acts = given;
}

// Reads the list again, or what the search finds.
export async function refresh() {
  const number = asked += 1;
  const needle = $('search').value.trim().toLowerCase();
  const found = needle ? search(await chats(), needle) : await heads();
  if (number !== asked) return;
  shown = found.sort((a, b) => b.changed - a.changed);
  $('none').hidden = shown.length > 0;
  $('none').textContent = needle ? 'Nothing found' : 'Chats are kept in this browser.';
  draw();
}

function search(all, needle) {
  return all.flatMap((chat) => {
    const [title, text] = [titleOf(chat), textOf(chat)];
    const at = text.toLowerCase().indexOf(needle);
    if (at < 0 && !title.toLowerCase().includes(needle)) return [];
    const piece = at < 0 ? '' : text.slice(Math.max(0, at - 20), at + 60).replace(/\s+/g, ' ');
    return [{id: chat.id, title, changed: chat.changed, piece}];
  });
}

export function draw() {
  const focused = document.activeElement?.closest('#list li')?.dataset.id;
  const first = shown.find((head) => head.id === acts.current()) ?? shown[0];
  patch($('list'), el('ul', {}, ...shown.map((head) => row(head, head === first))));
  if (focused) focus(shown.findIndex((head) => head.id === focused));
}

function row(head, isTabStop) {
  const link = el('a', {href: `#${head.id}`, title: head.title, tabIndex: isTabStop ? 0 : -1}, el('span', {dir: 'auto'}, visible(head.title)));
  if (head.piece) link.append(el('small', {dir: 'auto'}, visible(head.piece)));
  if (head.id === acts.current()) link.ariaCurrent = 'page';
  const rename = el('button', {title: 'Rename (F2)', tabIndex: -1}, icon('pen'));
  const remove = el('button', {title: 'Delete (Delete)', tabIndex: -1}, icon('bin'));
  const item = el('li', {className: acts.isWriting(head.id) ? 'writes' : ''}, link, rename, remove);
  item.dataset.id = head.id;
  return item;
}

function focus(at) {
  const links = $('list').querySelectorAll('a');
  links[Math.max(0, Math.min(at, links.length - 1))]?.focus();
}

export function edit(head) {
  const item = [...$('list').children].find((each) => each.dataset.id === head.id);
  const input = el('input', {value: head.title, ariaLabel: 'Name of the chat', maxLength: 200});
  const leave = async (name) => {
    input.onblur = null;
    if (name && name !== head.title) await acts.rename(head.id, name);
    draw();
    focus(shown.findIndex((each) => each.id === head.id));
  };
  input.onblur = () => leave(input.value.trim());
  input.onkeydown = (event) => {
    event.stopPropagation();
    if (event.key === 'Enter') leave(input.value.trim());
    if (event.key === 'Escape') leave('');
  };
  item.replaceChildren(input);
  input.select();
}

let soon;
$('search').oninput = () => {
  clearTimeout(soon);
  soon = setTimeout(refresh, 150);
};
$('search').onkeydown = (event) => {
  if (event.key === 'ArrowDown') focus(0);
  if (event.key === 'Enter') $('list').querySelector('a')?.click();
};
const rowOf = (event) => [...$('list').children].indexOf(event.target.closest('li'));
$('list').onclick = (event) => {
  const button = event.target.closest('button');
  if (button?.matches(':last-child')) acts.remove(shown[rowOf(event)].id);
  else if (button) edit(shown[rowOf(event)]);
};
$('list').onkeydown = (event) => {
  const at = rowOf(event);
  const does = {
    ArrowDown: () => focus(at + 1),
    ArrowUp: () => (at ? focus(at - 1) : $('search').focus()),
    Home: () => focus(0),
    End: () => focus(shown.length - 1),
    F2: () => edit(shown[at]),
    Delete: () => acts.remove(shown[at].id),
  }[event.key];
  if (at < 0 || !does) return;
  event.preventDefault();
  does();
};
