// Text files that are sent with a message.

import {$, amount, el, toast, visible} from './dom.js';
import {state} from './state.js';

const MAX_BYTES = 1 << 20;

async function attach(files) {
  for (const file of files) {
    try {
      if (file.size > MAX_BYTES) throw new Error(`is larger than ${amount(MAX_BYTES)}`);
      const text = new TextDecoder('utf-8', {fatal: true}).decode(await file.arrayBuffer());
      if (text.includes('\0')) throw new Error('is not text');
      state.files = [...state.files, {name: file.name, text}];
    } catch ({name, message}) {
      toast(`${file.name} ${name === 'TypeError' ? 'is not text in UTF-8' : message}`);
    }
  }
  showFiles();
  $('input').focus();
}

export function showFiles() {
  const chip = (file) => {
    const drop = () => {
      state.files = state.files.filter((each) => each !== file);
      showFiles();
      $('input').focus();
    };
    const title = `Remove ${file.name}`;
    return el('li', {}, el('bdi', {}, visible(file.name)), el('small', {}, amount(new Blob([file.text]).size)), el('button', {title, ariaLabel: title, onclick: drop, textContent: '×'}));
  };
  $('files').replaceChildren(...state.files.map(chip));
  $('input').dispatchEvent(new Event('input'));
}

$('attach').onclick = () => $('pick').click();
$('pick').onchange = async ({target}) => {
  await attach(target.files);
  target.value = '';
};
document.ondragover = (event) => event.preventDefault();
document.ondrop = (event) => {
  event.preventDefault();
  if (!$('attach').hidden) attach(event.dataTransfer.files);
};
$('input').onpaste = (event) => {
  if (!event.clipboardData.files.length || $('attach').hidden) return;
  event.preventDefault();
  attach(event.clipboardData.files);
};
