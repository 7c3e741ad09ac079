// What the parts of the page share.

import {path} from './talk.js';

export const state = {
  model: null, // as /v1/models tells of it
  chat: null, // the one that is open
  views: [], // of its last turns, or one of its whole text
  files: [], // attached to the next message
  follows: true, // whether the newest line is kept in sight
};
export const jobs = new Map(); // answers that are being written, by chat

export const turns = () => path(state.chat);
export const running = () => jobs.get(state.chat.id);
export const completes = () => state.chat.kind === 'text';
export const viewOf = (turn) => state.views.find((view) => view.turn === turn);
