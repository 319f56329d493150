//! From a batch to a step: who gets how many tokens of this step and the memory for them. Owner: Decode.
//! Invariant: older requests first when memory is short, decodes and extends before prefill chunks when the token
//! budget is short; every request of the batch comes out exactly once.

use crate::executor::{ExecutorLimits, Needs, Step};
use crate::kv::KvPool;
use crate::request::{Queued, Running};

/// A prefill chunk is never cut shorter than this, unless it is the rest of the prompt.
const CHUNK_MIN: u32 = 16;

/// Tokens to catch up on from which a row counts as prefill rather than as extend.
const PREFILL_MIN: u32 = 64;

/// A step, the states in it (row by row), and who could not take part this time.
#[derive(Debug, Default)]
pub struct Plan {
    /// The rows.
    pub step: Step,
    /// The state behind each row.
    pub running: Vec<Running>,
    /// Memory or budget was short; they wait for the next step.
    pub deferred: Vec<Queued>,
}

/// Makes a step of a batch.
///
/// `needs` are the signals the routing algorithm reads after a step of this model (requests for a single model get
/// none but what they report).
pub fn plan(batch: Vec<Queued>, limits: &ExecutorLimits, pool: &KvPool, needs: Needs) -> Plan {
    let mut plan = Plan::default();
    let ready = admit(batch, pool, &mut plan.deferred);
    let mut budget = Budget::new(&ready, limits);
    for queued in ready {
        let consumes = budget.take(queued.behind());
        if consumes == 0 {
            plan.deferred.push(queued);
            continue;
        }
        let needs = if queued.is_pinned() { Needs::default() } else { needs };
        match queued.start(consumes, needs) {
            Ok((running, row)) => {
                plan.step.rows.push(row);
                plan.running.push(running);
            }
            Err((queued, _short)) => plan.deferred.push(queued),
        }
    }
    plan
}

/// Oldest first: those that hold memory already, and new ones as long as the pool has room beside older requests.
fn admit(mut batch: Vec<Queued>, pool: &KvPool, deferred: &mut Vec<Queued>) -> Vec<Queued> {
    batch.sort_by_key(Queued::id);
    let mut ready = Vec::with_capacity(batch.len());
    let mut promised = 0;
    for mut queued in batch {
        if queued.is_cold() {
            if !pool.admits(queued.id(), promised + queued.behind()) {
                deferred.push(queued);
                continue;
            }
            promised += queued.behind();
            queued.adopt_prefix();
        }
        ready.push(queued);
    }
    ready
}

/// Tokens and rows left in a step. Decodes and extends have their tokens reserved before prefill gets any, so that a
/// long prompt never keeps running requests from moving.
struct Budget {
    rows: u32,
    reserved: u32,
    tokens: u32,
}

impl Budget {
    fn new(batch: &[Queued], limits: &ExecutorLimits) -> Self {
        let short = batch.iter().map(Queued::behind).filter(|&behind| behind < PREFILL_MIN);
        let reserved = short.sum::<u32>().min(limits.step_tokens_max);
        Budget { rows: limits.rows_max, reserved, tokens: limits.step_tokens_max - reserved }
    }

    /// Takes up to `behind` tokens and a row out; 0 = not this time.
    fn take(&mut self, behind: u32) -> u32 {
        let is_short = behind < PREFILL_MIN;
        let granted = match () {
            () if self.rows == 0 => 0,
            () if is_short && behind <= self.reserved => behind,
            () if is_short => 0,
            () => Some(behind.min(self.tokens)).filter(|&chunk| chunk == behind || chunk >= CHUNK_MIN).unwrap_or(0),
        };
        let from = if is_short { &mut self.reserved } else { &mut self.tokens };
        *from -= granted;
        self.rows -= u32::from(granted > 0);
        granted
    }
}
