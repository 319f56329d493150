//! Many sequences through one model, without a runtime: what each consumes next is the caller's choice, so the same loop
//! generates greedily and teacher-forces. Owner: the command. Invariant: a sequence sees the same tokens at the same
//! positions whatever runs beside it; every position that the caller sees is a drawn row of its own.
//!
//! An executor reports signals at the last row of a span only. A forced answer is therefore fed token by token, many
//! sequences at a time: as many model passes as its longest answer has tokens.

use crate::cli::CliError;
use std::sync::Arc;
use tokenrouter_core::executor::{Draw, Drawn, Executor, ExecutorLimits, Needs, PAGE_TOKENS, Row, RowOutput, Step};
use tokenrouter_core::ids::{RequestId, TokenId};
use tokenrouter_core::job::Failure;
use tokenrouter_core::sampling::SamplingParams;

/// A model that sequences are put through.
pub struct Driver {
    executor: Box<dyn Executor>,
    limits: ExecutorLimits,
}

/// A sequence in a slot; slot `n` has the n-th equal part of the KV memory.
struct Active {
    index: usize,
    tokens: Vec<TokenId>,
    fed: usize,
}

impl Driver {
    /// A driver with an executor of its own.
    pub fn new(executor: Box<dyn Executor>) -> Driver {
        let limits = executor.limits();
        Driver { executor, limits }
    }

    /// Longest sequence, in tokens.
    pub fn context_len(&self) -> usize {
        self.limits.context_len as usize
    }

    /// Puts every prompt through the model. `next` gets the index of a sequence and the greedy candidate after its last
    /// token with the signals asked for, and says which token is consumed next; `None`, or a full context, ends it.
    ///
    /// # Errors
    /// [`CliError::Usage`] for prompts that are empty or too long and for KV memory that holds no sequence,
    /// [`CliError::Broken`] when the model fails.
    pub fn run(
        &mut self,
        prompts: &[Vec<TokenId>],
        needs: Needs,
        mut next: impl FnMut(usize, Drawn) -> Option<TokenId>,
    ) -> Result<(), CliError> {
        let context = self.context_len();
        if let Some(len) = prompts.iter().map(Vec::len).find(|&len| len == 0 || len > context) {
            return Err(CliError::Usage(format!("a prompt has {len} tokens; it must have 1 to {context}")));
        }
        let draw = Draw { params: Arc::new(SamplingParams::default()), needs, ..Draw::default() };
        let mut slots: Vec<Option<Active>> = (0..self.slots()?).map(|_| None).collect();
        let mut waiting = prompts.iter().enumerate();
        loop {
            for slot in slots.iter_mut().filter(|slot| slot.is_none()) {
                *slot = waiting.next().map(|(index, tokens)| Active { index, tokens: tokens.clone(), fed: 0 });
            }
            let step = self.step(&slots, &draw);
            if step.rows.is_empty() {
                return Ok(());
            }
            let output = self.executor.step(&step).map_err(|error| broken(error.to_string()))?;
            for (row, answer) in step.rows.iter().zip(output.rows) {
                let slot = &mut slots[row.request.0 as usize];
                let Some(active) = slot else { continue };
                active.fed += row.tokens.len();
                match answer {
                    RowOutput::Fed(_) => {}
                    RowOutput::Failed(reason) => return Err(broken(reason)),
                    RowOutput::Drawn(drawn) => match next(active.index, drawn) {
                        Some(token) if active.tokens.len() < context => active.tokens.push(token),
                        _ => *slot = None,
                    },
                }
            }
        }
    }

    /// Pages of one sequence of the full context.
    fn pages_each(&self) -> u32 {
        self.limits.context_len.div_ceil(PAGE_TOKENS as u32).max(1)
    }

    /// Sequences at a time.
    fn slots(&self) -> Result<u32, CliError> {
        let each = self.pages_each();
        match (self.limits.pages / each).min(self.limits.rows_max).min(self.limits.step_tokens_max) {
            0 => Err(CliError::Usage(format!(
                "kv memory of {} pages holds no sequence of the full context, which needs {each}; raise kv_memory or lower context_len",
                self.limits.pages
            ))),
            slots => Ok(slots),
        }
    }

    /// What every sequence has to consume, prompts cut so that the step stays within its limit of tokens.
    fn step(&self, slots: &[Option<Active>], draw: &Draw) -> Step {
        let mut spare = (self.limits.step_tokens_max as usize).saturating_sub(slots.iter().flatten().count());
        let mut rows = Vec::new();
        let each = self.pages_each();
        for (slot, active) in (0u32..).zip(slots) {
            let Some(Active { tokens, fed, .. }) = active else { continue };
            let len = (tokens.len() - fed).min(1 + spare);
            spare -= len - 1;
            let end = fed + len;
            let pages = end.div_ceil(PAGE_TOKENS) as u32;
            rows.push(Row {
                request: RequestId(u64::from(slot)),
                start: *fed as u32,
                tokens: tokens[*fed..end].to_vec(),
                pages: (slot * each..slot * each + pages).collect(),
                draw: (end == tokens.len()).then(|| draw.clone()),
                targets: None,
            });
        }
        Step { rows }
    }
}

fn broken(reason: String) -> CliError {
    CliError::Broken(Failure::Internal(reason))
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokenrouter_core::executor::{ExecutorError, StepOutput};
    use tokenrouter_core::rng::{Stream, unit};

    const CONTEXT: u32 = 40;

    /// Draws a hash of everything that its pages hold, so a token that is lost, doubled or misplaced shows.
    struct Hash {
        pages: u32,
        memory: Vec<TokenId>,
        rows_seen: usize,
    }

    fn hash(tokens: &[TokenId]) -> TokenId {
        tokens.iter().fold(17u32, |sum, token| sum.wrapping_mul(31).wrapping_add(*token)) % 97
    }

    impl Executor for Hash {
        fn limits(&self) -> ExecutorLimits {
            ExecutorLimits { pages: self.pages, rows_max: 3, step_tokens_max: 7, context_len: CONTEXT, vocab_width: 97 }
        }

        fn step(&mut self, step: &Step) -> Result<StepOutput, ExecutorError> {
            assert!(step.tokens() <= 7 && step.rows.len() <= 3, "{step:?}");
            self.rows_seen = self.rows_seen.max(step.rows.len());
            let mut rows = Vec::new();
            for row in &step.rows {
                let at =
                    |position: usize| row.pages[position / PAGE_TOKENS] as usize * PAGE_TOKENS + position % PAGE_TOKENS;
                for (offset, &token) in row.tokens.iter().enumerate() {
                    self.memory[at(row.start as usize + offset)] = token;
                }
                let all: Vec<TokenId> =
                    (0..row.start as usize + row.tokens.len()).map(|p| self.memory[at(p)]).collect();
                rows.push(match row.draw {
                    None => RowOutput::Fed(Vec::new()),
                    Some(_) => RowOutput::Drawn(Drawn { token: hash(&all), ..Drawn::default() }),
                });
            }
            Ok(StepOutput { rows })
        }
    }

    fn driver(pages: u32) -> Driver {
        Driver::new(Box::new(Hash { pages, memory: vec![0; pages as usize * PAGE_TOKENS], rows_seen: 0 }))
    }

    #[test]
    fn sequences_side_by_side_equal_each_one_alone() {
        for case in 0..20u64 {
            let draw = |at: u32, below: f64| (unit(case, at, Stream::Owner) * below) as usize;
            let prompts: Vec<Vec<TokenId>> = (0..9u32)
                .map(|p| (0..1 + draw(p, 20.0)).map(|t| draw(100 * p + t as u32, 97.0) as TokenId).collect())
                .collect();
            let forced: Vec<Vec<TokenId>> =
                (0..9u32).map(|p| (0..draw(50 + p, 30.0)).map(|t| p + t as TokenId).collect()).collect();
            let (mut seen, mut expected) = (vec![Vec::new(); 9], vec![Vec::new(); 9]);
            let result = driver(9).run(&prompts, Needs::default(), |index, drawn| {
                seen[index].push(drawn.token);
                forced[index].get(seen[index].len() - 1).copied()
            });
            assert!(result.is_ok(), "{result:?}");
            for index in 0..9 {
                let mut tokens = prompts[index].clone();
                expected[index].push(hash(&tokens));
                for &token in forced[index].iter().take(CONTEXT as usize - prompts[index].len()) {
                    tokens.push(token);
                    expected[index].push(hash(&tokens));
                }
            }
            assert_eq!(seen, expected, "case {case}");
        }
    }

    #[test]
    fn what_does_not_fit_is_refused() {
        for (pages, prompts, part) in [
            (9, vec![vec![1], vec![]], "has 0 tokens"),
            (9, vec![vec![1; 41]], "1 to 40"),
            (2, vec![vec![1]], "needs 3"),
        ] {
            let error = driver(pages).run(&prompts, Needs::default(), |_, _| None).expect_err(part).to_string();
            assert!(error.contains(part), "{error}");
        }
    }
}
