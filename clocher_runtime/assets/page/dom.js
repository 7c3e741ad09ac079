// Small tools for elements, text and what the browser keeps.

export const $ = (id) => document.getElementById(id);

export function el(tag, props, ...children) {
  const node = Object.assign(document.createElement(tag), props);
  node.append(...children);
  return node;
}

export function icon(name) {
  const svg = document.createElementNS('http://www.w3.org/2000/svg', 'svg');
  const use = document.createElementNS('http://www.w3.org/2000/svg', 'use');
  use.setAttribute('href', `#i-${name}`);
  svg.append(use);
  svg.ariaHidden = 'true';
  return svg;
}

// Control characters and marks of direction are made visible.
export function visible(text) {
  return text.replace(/\r/g, '').replace(/[\0-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]/g, (sign) => {
    const code = sign.charCodeAt(0);
    return code < 0x20 ? String.fromCharCode(0x2400 + code) : `⟦U+${code.toString(16).toUpperCase().padStart(4, 0)}⟧`;
  });
}

// Makes `old` like `made` and leaves alone what is equal: selections and scroll positions stay.
export function patch(old, made) {
  const [before, after] = [[...old.childNodes], [...made.childNodes]];
  const fits = (had, node) => had.cloneNode().isEqualNode(node.cloneNode()) && node.childNodes.length < had.childNodes.length + 100;
  before.forEach((had, at) => {
    const node = after[at];
    if (!node) had.remove();
    else if (had.isEqualNode(node)) return;
    else if (had instanceof Text && node instanceof Text && node.data.startsWith(had.data)) had.appendData(node.data.slice(had.length));
    else if (node instanceof Element && fits(had, node)) patch(had, node);
    else had.replaceWith(node);
  });
  old.append(...after.slice(before.length));
}

export async function copy(button, text) {
  try {
    await navigator.clipboard.writeText(text);
  } catch { // a page that came neither over TLS nor from this machine has no clipboard
    const area = el('textarea', {value: text, className: 'unseen'});
    document.body.append(area);
    area.select();
    document.execCommand('copy');
    area.remove();
    button.focus();
  }
  button.textContent = 'Copied';
  setTimeout(() => { button.textContent = 'Copy'; }, 1500);
}

export function download(name, text, type) {
  const href = URL.createObjectURL(new Blob([text], {type}));
  el('a', {href, download: name.replace(/[^\p{L}\p{N}.-]+/gu, '-').slice(-80)}).click();
  setTimeout(() => URL.revokeObjectURL(href), 10000);
}

export const say = (text) => { $('status').textContent = text; };

// A line that goes away, with a way back from what was done.
let toastEnds;
export function toast(text, undo) {
  const [span, button] = $('toast').children;
  span.textContent = text;
  button.hidden = !undo;
  button.onclick = () => {
    $('toast').hidden = true;
    undo();
    $('input').focus();
  };
  $('toast').hidden = false;
  if (undo) button.focus();
  clearTimeout(toastEnds);
  toastEnds = setTimeout(() => { $('toast').hidden = true; }, 12000);
}

export function stored(where, name) {
  try {
    return JSON.parse(where.getItem(`clocher.${name}`));
  } catch {
    return null;
  }
}

export function store(where, name, value) {
  try {
    where.setItem(`clocher.${name}`, JSON.stringify(value));
  } catch { // full, or switched off: the page works without
  }
}

export const short = (number) => (number < 10 ? number.toFixed(1) : Math.round(number).toLocaleString());

export function amount(bytes) {
  if (bytes < 1e3) return `${bytes} B`;
  if (bytes < 1e5) return `${(bytes / 1e3).toFixed(1)} kB`;
  return bytes < 1e9 ? `${(bytes / 1e6).toFixed(1)} MB` : `${(bytes / 1e9).toFixed(2)} GB`;
}
