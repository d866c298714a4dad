/** The connection to the hub: says hello, comes back when it is lost, asks for history. */

import { decode } from "./frame.js";

const VERSION = 1;
const FIRST_WAIT_MS = 500;
const LAST_WAIT_MS = 15000;

/**
 * One connection that is made again whenever it is lost. Calls `on.message(object)`, `on.frame(message)` and
 * `on.state()`; `state` is `idle`, `connecting`, `connected`, `lost` or `refused`.
 */
export class Live {
  constructor(on) {
    this.on = on;
    this.state = "idle";
    this.role = undefined;
    this.token = "";
    this.wanted = "controller";
    this.takeover = false;
    this.lostAt = undefined;
    this.retryAt = undefined;
    this.refusal = "";
    this.busy = false; // somebody else is the controller
    this.waiting = new Map(); // id of a history -> resolve
    this.wait = FIRST_WAIT_MS;
    this.nextId = 1;
  }

  /** Starts, or starts anew with another token. */
  start(token) {
    this.token = token;
    this.wanted = "controller";
    this.open();
  }

  /** Becomes the controller in place of another one. */
  takeOver() {
    this.wanted = "controller";
    this.takeover = true;
    this.open();
  }

  open() {
    clearTimeout(this.timer);
    this.close();
    this.set(this.lostAt === undefined ? "connecting" : "lost");
    const url = new URL("live", location.href);
    url.protocol = url.protocol.replace("http", "ws");
    url.hash = "";
    const socket = new WebSocket(url);
    socket.binaryType = "arraybuffer";
    this.socket = socket;
    this.refused = undefined;
    socket.onopen = () => {
      const takeover = this.takeover ? { takeover: true } : {};
      this.send({ type: "hello", v: VERSION, role: this.wanted, token: this.token, ...takeover });
    };
    socket.onmessage = (event) => {
      if (socket === this.socket) this.take(event.data);
    };
    socket.onclose = () => {
      if (socket === this.socket) this.closed();
    };
  }

  close() {
    const old = this.socket;
    this.socket = undefined;
    old?.close();
    this.waiting.forEach((resolve) => resolve(false));
    this.waiting.clear();
  }

  take(data) {
    if (typeof data !== "string") {
      try {
        this.on.frame(decode(data));
      } catch (error) {
        this.on.message({ type: "problem", text: `The hub sent ${error.message}.` });
      }
      return;
    }
    const message = JSON.parse(data);
    if (message.type === "welcome") this.welcomed(message);
    else if (message.type === "error" && this.state !== "connected") this.refused = message;
    else if (message.code === "too_many") this.waiting.forEach((resolve) => resolve(false));
    else if (message.type === "demoted") this.role = "viewer";
    else if (message.type === "done") this.waiting.get(message.id)?.(true);
    this.on.message(message);
  }

  welcomed(message) {
    this.role = message.role;
    this.busy = message.role === "viewer" && this.busy;
    this.takeover = false;
    this.lostAt = undefined;
    this.wait = FIRST_WAIT_MS;
    this.set("connected");
  }

  /** The hub has hung up, or cannot be reached. */
  closed() {
    this.close();
    const code = this.refused?.code;
    if (this.wanted === "controller" && (code === "unauthorized" || code === "forbidden" || code === "busy")) {
      this.wanted = "viewer";
      this.takeover = false;
      this.busy = code === "busy";
      this.open();
    } else if (code === "unauthorized" || code === "version") {
      this.refusal = this.refused.text;
      this.set("refused");
    } else {
      this.refusal = this.refused?.text ?? "";
      this.retry();
    }
  }

  retry() {
    this.lostAt ??= Date.now();
    this.retryAt = Date.now() + this.wait;
    this.timer = setTimeout(() => this.open(), this.wait);
    this.wait = Math.min(this.wait * 2, LAST_WAIT_MS);
    this.set("lost");
  }

  /** Tries at once. */
  hurry() {
    if (this.state === "lost") this.open();
  }

  set(state) {
    this.state = state;
    this.on.state();
  }

  send(message) {
    if (this.socket?.readyState === WebSocket.OPEN) this.socket.send(JSON.stringify(message));
  }

  /**
   * Asks for frames of steps that have been; they come as frames.
   * @returns {Promise<boolean>} whether all have come
   */
  history(run, first, last) {
    if (this.state !== "connected") return Promise.resolve(false);
    const id = String(this.nextId++);
    this.send({ type: "history", id, run, first, last });
    return new Promise((resolve) => {
      this.waiting.set(id, (isDone) => {
        this.waiting.delete(id);
        resolve(isDone);
      });
    });
  }
}
