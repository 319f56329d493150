//! From a batch to a step: who gets how many tokens of this step and the memory for them. Owner: Decode.
//! Invariant: older requests first when memory is short, decodes and extends before prefill chunks when the token
//! budget is short; every request of the batch comes out exactly once.

use crate::executor::{ExecutorLimits, Needs, Step};
use crate::kv::KvPool;
use crate::request::{Queued, Running};

/// A step must hold this many tokens: a prefill chunk and decodes beside it.
pub const STEP_TOKENS_MIN: u32 = 2 * CHUNK_MIN;

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
    let mut ready = admit(batch, pool, &mut plan.deferred);
    let mut limits = *limits;
    loop {
        let shares = share(&ready, &limits);
        let mut passed_over = Vec::new();
        let mut is_short = false;
        for (queued, consumes) in ready.into_iter().zip(shares) {
            if consumes == 0 {
                passed_over.push(queued);
                continue;
            }
            let needs = if queued.is_pinned() { Needs::default() } else { needs };
            match queued.start(consumes, needs) {
                Ok((running, row)) => {
                    limits.step_tokens_max -= consumes;
                    limits.rows_max -= 1;
                    plan.step.rows.push(row);
                    plan.running.push(running);
                }
                Err((queued, _short)) => {
                    is_short = true;
                    plan.deferred.push(queued);
                }
            }
        }
        // Who lacks memory gives its share of the step to those who were passed over; else it could starve the oldest,
        // whose turn alone makes memory free.
        if !is_short || passed_over.is_empty() {
            plan.deferred.extend(passed_over);
            return plan;
        }
        ready = passed_over;
    }
}

/// Oldest first: those that hold memory already, and new ones as long as the pool has room beside older requests.
fn admit(mut batch: Vec<Queued>, pool: &KvPool, deferred: &mut Vec<Queued>) -> Vec<Queued> {
    batch.sort_by_key(Queued::id);
    let mut ready = Vec::with_capacity(batch.len());
    let mut promised = 0;
    for mut queued in batch {
        if queued.is_cold() {
            if !pool.admit(queued.seniority(), promised + queued.behind()) {
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

/// How many tokens of the step each may consume; who waited longest chooses first, so nobody is passed over twice.
fn share(ready: &[Queued], limits: &ExecutorLimits) -> Vec<u32> {
    let mut budget = Budget::new(ready, limits);
    let mut order: Vec<usize> = (0..ready.len()).collect();
    order.sort_by_key(|&index| ready[index].since());
    let mut shares = vec![0; ready.len()];
    for index in order {
        shares[index] = budget.take(ready[index].behind());
    }
    shares
}

/// Tokens and rows left in a step. Decodes and extends have their tokens reserved before prefill gets any, so that a
/// long prompt never keeps running requests from moving; one prefill chunk always fits, so that they never keep it out.
struct Budget {
    rows: u32,
    reserved: u32,
    tokens: u32,
}

impl Budget {
    fn new(batch: &[Queued], limits: &ExecutorLimits) -> Self {
        let short = batch.iter().map(Queued::behind).filter(|&behind| behind < PREFILL_MIN);
        let chunk = if batch.iter().any(|queued| queued.behind() >= PREFILL_MIN) { CHUNK_MIN } else { 0 };
        let reserved = short.sum::<u32>().min(limits.step_tokens_max.saturating_sub(chunk));
        Budget { rows: limits.rows_max, reserved, tokens: limits.step_tokens_max - reserved }
    }

    /// Takes up to `behind` tokens and a row out; 0 = not this time.
    fn take(&mut self, behind: u32) -> u32 {
        let is_short = behind < PREFILL_MIN;
        let from = if is_short { &mut self.reserved } else { &mut self.tokens };
        let chunk = behind.min(*from);
        let worthwhile = is_short || chunk == behind || chunk >= CHUNK_MIN;
        let granted = if worthwhile && self.rows > 0 { chunk } else { 0 };
        *from -= granted;
        self.rows -= u32::from(granted > 0);
        granted
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ids::{ModelIdx, RequestId, Time};
    use crate::job::Target;
    use crate::request::{RequestSpec, Seat};
    use crate::routing::{Algorithm, stay::Stay};
    use crate::sampling::SamplingParams;
    use proptest::prelude::*;
    use std::sync::Arc;

    fn queued(id: u64, tokens: u32, pool: &KvPool) -> Queued {
        let spec = RequestSpec {
            id: RequestId(id),
            home: ModelIdx(0),
            models: 1,
            prompt_len: tokens,
            len_max: tokens + 1,
            len_min: tokens,
            eos: Vec::new(),
            stop_ids: Vec::new(),
            sampling: Arc::new(SamplingParams::default()),
            constraint: None,
            target: Target::Routed,
            algorithm: 0,
            routing: None,
            logprobs: None,
            entropy: false,
        };
        let route = Stay { models: 1 }.start();
        let prompt = (0..tokens).map(|at| id as u32 * 1000 + at).collect();
        Queued::arrive(Arc::new(spec), prompt, Seat { me: ModelIdx(0), pool, route, constraint: None, now: Time(0) })
    }

    proptest! {
        #[test]
        fn every_request_comes_out_once_and_limits_hold(lens in prop::collection::vec(prop_oneof![1u32..4, 60u32..70, 1u32..400], 1..12), pages in 4u32..60, rows_max in 1u32..8, step_tokens_max in 64u32..200) {
            let limits = ExecutorLimits { pages, rows_max, step_tokens_max, context_len: 1000, vocab_width: 10 };
            let pool = KvPool::new(pages);
            let batch = lens.iter().zip(1..).map(|(&len, id)| queued(id, len, &pool)).collect();
            let plan = plan(batch, &limits, &pool, Needs::default());
            let mut ids: Vec<u64> = plan.running.iter().map(|running| running.id().0).chain(plan.deferred.iter().map(|queued| queued.id().0)).collect();
            ids.sort_unstable();
            prop_assert_eq!(ids, (1..=lens.len() as u64).collect::<Vec<_>>());
            prop_assert!(plan.step.tokens() <= step_tokens_max as usize && plan.step.rows.len() <= rows_max as usize);
            for (row, running) in plan.step.rows.iter().zip(&plan.running) {
                let end = row.start + row.tokens.len() as u32;
                prop_assert_eq!(row.request, running.id());
                prop_assert!(row.pages.len() * crate::executor::PAGE_TOKENS >= end as usize);
                prop_assert_eq!(row.draw.is_some(), end == lens[row.request.0 as usize - 1]);
            }
            let fits = lens[0].div_ceil(16) <= pages;
            prop_assert!(!fits || plan.running.iter().any(|running| running.id() == RequestId(1)), "the oldest takes part");
        }
    }

    /// Feeds a request its first chunk and queues it again.
    fn begun(queued: Queued, limits: &ExecutorLimits, pool: &KvPool, now: u64) -> Queued {
        let mut plan = plan(vec![queued], limits, pool, Needs::default());
        plan.running.pop().expect("it takes part").fed(Vec::new(), Time(now))
    }

    /// The younger request waited longer and would fill the step, but the older one holds the memory it needs.
    #[test]
    fn who_lacks_memory_does_not_keep_the_oldest_out() {
        let limits = ExecutorLimits { pages: 4, rows_max: 8, step_tokens_max: 32, context_len: 1000, vocab_width: 10 };
        let pool = KvPool::new(4);
        let younger = begun(queued(2, 64, &pool), &limits, &pool, 1);
        let older = begun(queued(1, 40, &pool), &limits, &pool, 5);
        assert_eq!((younger.behind(), older.behind(), pool.stats().pages_free), (32, 8, 0));
        let plan = plan(vec![younger, older], &limits, &pool, Needs::default());
        let started: Vec<u64> = plan.running.iter().map(|running| running.id().0).collect();
        assert_eq!((started, plan.deferred.len()), (vec![1], 1));
    }

    #[test]
    fn decodes_keep_moving_beside_a_long_prompt() {
        let limits = ExecutorLimits { pages: 64, rows_max: 8, step_tokens_max: 64, context_len: 1000, vocab_width: 10 };
        let pool = KvPool::new(64);
        let batch = vec![queued(1, 300, &pool), queued(2, 1, &pool), queued(3, 5, &pool)];
        let plan = plan(batch, &limits, &pool, Needs::default());
        let consumed: Vec<(u64, usize)> = plan.step.rows.iter().map(|row| (row.request.0, row.tokens.len())).collect();
        assert_eq!(consumed, [(1, 58), (2, 1), (3, 5)]);
    }
}
