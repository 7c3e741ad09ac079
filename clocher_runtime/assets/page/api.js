// Requests to the server that this page came from.

import {$, store, stored} from './dom.js';

// The text of an error: what happened, and what to do.
export const fault = (message, advice = '') => Object.assign(new Error(message), {advice});

export function faultOf(status, {code, message = `The server answered with status ${status}.`} = {}) {
  const advice = {
    context_length_exceeded: 'Begin a new chat, shorten the message, or lower “Max tokens”.',
    engine_failed: 'It is started again by itself, which takes some seconds.',
    timeout: 'Lower “Max tokens” in the settings.',
  };
  return fault(message, advice[code]);
}

export async function request(path, body, signal) {
  const headers = {};
  const key = stored(sessionStorage, 'key');
  if (key) headers.Authorization = `Bearer ${key}`;
  if (body) headers['Content-Type'] = 'application/json';
  const response = await fetch(path, {method: body ? 'POST' : 'GET', headers, body: JSON.stringify(body), signal}).catch((error) => {
    if (signal?.aborted) throw error;
    throw fault('The server cannot be reached.', 'See whether it is running, then try again.');
  });
  if (response.ok) return response;
  const {error} = await response.json().catch(() => ({}));
  if (response.status !== 401) throw faultOf(response.status, error);
  await askForKey(key);
  return request(path, body, signal);
}

function askForKey(had) {
  $('why').textContent = had ? 'The key was refused. Another one:' : 'Key';
  $('key').value = '';
  $('ask').showModal();
  return new Promise((resolve) => {
    $('ask').onclose = () => resolve(store(sessionStorage, 'key', $('key').value));
  });
}

export async function* events(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = '';
  for (;;) {
    const {value, done} = await reader.read().catch(() => ({done: true}));
    if (done) throw fault('The connection ended before the answer did.', 'Is the server running? Try again.');
    const lines = (rest + value).split('\n');
    rest = lines.pop();
    for (const line of lines) {
      if (line.startsWith('data: [DONE]')) return;
      if (line.startsWith('data: ')) yield JSON.parse(line.slice(6));
    }
  }
}
