//! An executor without a runtime around it: it answers requests side by side and every step has a token of each, as the
//! steps of a runtime have when all of them are live. Owner: the command. Invariant: the clock runs only while the executor
//! steps.

use crate::cli::CliError;
use crate::launch::{LaunchError, Loaded};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokenrouter_core::executor::{Draw, Executor, Needs, PAGE_TOKENS, Row, RowOutput, Step};
use tokenrouter_core::ids::{ModelIdx, RequestId, TokenId};
use tokenrouter_core::job::{Failure, Job, Prompt};

/// What a bench of whole answers found, of a runtime or of an executor.
#[derive(Clone, Debug, Default)]
pub struct Answered {
    /// How long it took, seconds.
    pub seconds: f64,
    /// The answers, one for each request.
    pub tokens: Vec<Vec<TokenId>>,
}

impl Answered {
    /// Tokens of all answers in a second.
    pub fn tokens_per_second(&self) -> f64 {
        self.tokens.iter().map(Vec::len).sum::<usize>() as f64 / self.seconds.max(1e-9)
    }
}

/// A model's executor with empty KV memory.
pub struct Bare {
    executor: Box<dyn Executor>,
    eos: Vec<TokenId>,
    needs: Needs,
}

impl Bare {
    /// An executor of its own for a model, which reports the signals that the router reads of it.
    ///
    /// # Errors
    /// The machine refuses threads or memory.
    pub fn new(loaded: &Loaded, model: ModelIdx) -> Result<Bare, CliError> {
        let (member, needs) = (&loaded.members[model.index()], loaded.algorithm.needs(model));
        let failed = |reason| LaunchError::Load { model: member.name.clone(), reason: Box::new(reason) };
        let executor = Box::new(member.model.executor().map_err(failed)?);
        Ok(Bare { executor, eos: member.model.info().eos.clone(), needs })
    }

    /// Answers these jobs, each with exactly its `max_tokens`. Their KV memory must fit the executor, a row for each into
    /// a step.
    ///
    /// # Errors
    /// A step fails, or a prompt is not made of tokens.
    pub fn answer(&mut self, jobs: &[Job]) -> Result<Answered, CliError> {
        let longest = jobs.iter().map(length).max().unwrap_or(0);
        let slot = longest.div_ceil(PAGE_TOKENS) as u32;
        let sequence = |(index, job)| Sequence::new((index, slot), job, (&self.eos, self.needs));
        let mut sequences: Vec<Sequence> = (0..).zip(jobs).map(sequence).collect::<Result<_, _>>()?;
        let mut spent = Duration::ZERO;
        loop {
            let (step, who) = self.next_step(&sequences);
            if who.is_empty() {
                break;
            }
            let began = Instant::now();
            let output = self.executor.step(&step).map_err(|error| broken(error.to_string()))?;
            spent += began.elapsed();
            for ((index, row), output) in who.into_iter().zip(&step.rows).zip(output.rows) {
                sequences[index].take(row, output)?;
            }
        }
        let tokens = sequences.into_iter().map(|sequence| sequence.tokens[sequence.prompt..].to_vec()).collect();
        Ok(Answered { seconds: spent.as_secs_f64(), tokens })
    }

    /// A row of each sequence that is not done, as long as the step has room, and whose rows they are.
    fn next_step(&self, sequences: &[Sequence]) -> (Step, Vec<usize>) {
        let mut room = self.executor.limits().step_tokens_max as usize;
        let (mut rows, mut who) = (Vec::new(), Vec::new());
        for (index, sequence) in sequences.iter().enumerate() {
            let feed = sequence.waiting().min(room);
            if feed > 0 {
                room -= feed;
                rows.push(sequence.row(feed));
                who.push(index);
            }
        }
        (Step { rows }, who)
    }
}

fn length(job: &Job) -> usize {
    let Prompt::Ids(prompt) = &job.prompt else { return 0 };
    prompt.len() + job.stop.max_tokens.unwrap_or(0) as usize
}

fn broken(reason: impl Into<String>) -> CliError {
    CliError::Broken(Failure::Internal(reason.into()))
}

/// A request as an executor sees it.
struct Sequence {
    id: RequestId,
    /// First page and number of pages.
    slot: (u32, u32),
    tokens: Vec<TokenId>,
    /// Tokens of the prompt.
    prompt: usize,
    /// Tokens at the end of the answer.
    end: usize,
    /// Tokens before this length may not end the text.
    early: usize,
    /// Tokens that have KV.
    fed: usize,
    draw: Draw,
}

impl Sequence {
    fn new((index, pages): (u32, u32), job: &Job, (eos, needs): (&[TokenId], Needs)) -> Result<Sequence, CliError> {
        let Prompt::Ids(prompt) = &job.prompt else { return Err(broken("a bench prompt is made of tokens")) };
        let draw = Draw { params: Arc::new(job.sampling.clone()), banned: Arc::from(eos), needs, ..Draw::default() };
        Ok(Sequence {
            id: RequestId(u64::from(index)),
            slot: (index * pages, pages),
            tokens: prompt.clone(),
            prompt: prompt.len(),
            end: length(job),
            early: prompt.len() + job.stop.min_tokens as usize,
            fed: 0,
            draw,
        })
    }

    /// Tokens to feed; none when the answer is complete.
    fn waiting(&self) -> usize {
        if self.tokens.len() < self.end { self.tokens.len() - self.fed } else { 0 }
    }

    fn row(&self, feed: usize) -> Row {
        let end = self.fed + feed;
        let draw = (end == self.tokens.len()).then(|| {
            let draw = self.draw.clone();
            if end < self.early { draw } else { Draw { banned: Arc::from([]), ..draw } }
        });
        let pages = (end.div_ceil(PAGE_TOKENS) as u32).min(self.slot.1);
        Row {
            request: self.id,
            start: self.fed as u32,
            tokens: self.tokens[self.fed..end].to_vec(),
            pages: (self.slot.0..self.slot.0 + pages).collect(),
            draw,
            targets: None,
        }
    }

    fn take(&mut self, row: &Row, output: RowOutput) -> Result<(), CliError> {
        self.fed += row.tokens.len();
        match output {
            RowOutput::Fed(_) => Ok(()),
            RowOutput::Drawn(drawn) => {
                self.tokens.push(drawn.token);
                Ok(())
            }
            RowOutput::Failed(reason) => Err(broken(reason)),
        }
    }
}
