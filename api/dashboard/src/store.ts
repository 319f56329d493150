// What the page knows: the state now, those of the last half minute, and ten minutes of numbers. Nothing grows beyond that.

import type { Requests, State } from "./data.ts";
import { sample } from "./sample.ts";

const HISTORY_MS = 10 * 60_000;
/** Window of percentiles. */
export const WINDOW_MS = 30_000;
/** Window of rates: short enough to be live, long enough to be read. */
const RATE_MS = 2_000;
/** More states than that do not come in a window. */
const STATES_MAX = 128;
/** Nor more samples in the history. */
const SAMPLES_MAX = 1_500;

export class Store {
  state: State | null = null;
  requests: Requests = { now_ms: 0, requests: [] };
  /** When each sample was taken. */
  times: number[] = [];
  #series = new Map<string, (number | null)[]>();
  #states: State[] = [];

  /** Takes the next state; a server that started again starts the history again. */
  push(state: State): void {
    const names = (of: State) => of.models.map((model) => model.name).join();
    if (this.state !== null && (state.now_ms < this.state.now_ms || names(state) !== names(this.state))) this.#clear();
    this.state = state;
    this.#states.push(state);
    while (this.#states.length > STATES_MAX || this.#stale()) this.#states.shift();
    this.#record(state.now_ms, sample(state, this.ago(RATE_MS), this.ago(WINDOW_MS)));
  }

  /** The state that long ago, or the oldest there is. */
  ago(ms: number): State {
    const now = this.#states.at(-1);
    if (now === undefined) throw new Error("no state yet");
    return this.#states.findLast((state) => state.now_ms <= now.now_ms - ms) ?? this.#states[0] ?? now;
  }

  series(key: string): (number | null)[] {
    return this.#series.get(key) ?? this.times.map(() => null);
  }

  /** Its newest value. */
  last(key: string): number | null {
    return this.#series.get(key)?.at(-1) ?? null;
  }

  /** How long the history is. */
  get length_ms(): number {
    return (this.times.at(-1) ?? 0) - (this.times[0] ?? 0);
  }

  /** The second oldest state is enough for the window: the oldest is not needed. */
  #stale(): boolean {
    const [, second] = this.#states;
    const now = this.#states.at(-1);
    return second !== undefined && now !== undefined && second.now_ms <= now.now_ms - WINDOW_MS;
  }

  #record(now_ms: number, values: Record<string, number | null>): void {
    for (const key of Object.keys(values)) {
      if (!this.#series.has(key)) this.#series.set(key, this.times.map(() => null));
    }
    this.times.push(now_ms);
    for (const [key, values_] of this.#series) values_.push(values[key] ?? null);
    while (this.times.length > SAMPLES_MAX || (this.times[0] ?? now_ms) < now_ms - HISTORY_MS) {
      this.times.shift();
      for (const values_ of this.#series.values()) values_.shift();
    }
  }

  #clear(): void {
    this.times = [];
    this.#series.clear();
    this.#states = [];
    this.requests = { now_ms: 0, requests: [] };
  }
}
