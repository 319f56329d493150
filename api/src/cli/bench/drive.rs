//! A closed loop of workers on a running runtime, without HTTP, and what they saw. Owner: the thread that drives.
//! Invariant: as many requests as there are workers are live from the first token that counts to the last.

use super::shape::{Corpus, Sizes};
use super::statistics::Spread;
use crate::cli::CliError;
use crate::cli::run;
use futures_util::future::try_join_all;
use std::cell::RefCell;
use std::time::{Duration, Instant};
use tokenrouter_actors::runtime::Runtime;
use tokenrouter_core::ids::{ModelIdx, TokenId};
use tokenrouter_core::job::{Event, Failure, Job, Prompt, StopRules, Target, TokenReport, Usage};
use tokenrouter_core::rng::mix;
use tokenrouter_core::routing::Algorithm;
use tokenrouter_core::sampling::SamplingParams;
use tokio::sync::Notify;

/// Tokens that every model makes before the clock starts.
const WARM_UP: u32 = 4;
/// How freely tokens are drawn: enough that a forced long answer does not go round in circles.
const TEMPERATURE: f32 = 0.6;

/// What is put to a runtime.
#[derive(Clone, Copy, Debug)]
pub struct Work<'a> {
    /// Lengths.
    pub sizes: Sizes,
    /// Where prompts come from.
    pub corpus: &'a Corpus,
    /// Who answers.
    pub target: Target,
    /// Knows where a routed request begins.
    pub algorithm: &'a dyn Algorithm,
    /// Requests live at once.
    pub workers: u32,
    /// Conversations to finish for each worker; the clock stops when as many are done by all together.
    pub conversations: u32,
    /// The same seed gives the same prompts and draws.
    pub seed: u64,
}

/// What the workers saw.
#[derive(Clone, Debug, Default)]
pub struct Seen {
    /// From the first submission to the end of the last request that was waited for, seconds.
    pub seconds: f64,
    /// Tokens that came in that time, those of requests that had not ended included.
    pub tokens: u64,
    /// Submission to the first token, seconds, each request.
    pub first_token: Vec<f64>,
    /// From the last token of the model where a request began to the first of another, seconds; requests whose first token
    /// came from another model have that in the time to their first token and none here.
    pub first_hop: Vec<f64>,
    /// Between one delivery of tokens and the next of the same request, seconds.
    pub between_tokens: Vec<f64>,
    /// Submission to the end, seconds, each request.
    pub whole: Vec<f64>,
    /// Totals of the requests that ended.
    pub usage: Usage,
}

impl Seen {
    /// Tokens per second of all workers together.
    pub fn tokens_per_second(&self) -> f64 {
        self.tokens as f64 / self.seconds.max(1e-9)
    }

    /// What another repetition saw, on top.
    pub fn add(&mut self, other: Seen) {
        self.seconds += other.seconds;
        self.tokens += other.tokens;
        self.first_token.extend(other.first_token);
        self.first_hop.extend(other.first_hop);
        self.between_tokens.extend(other.between_tokens);
        self.whole.extend(other.whole);
        self.count(&other.usage);
    }

    fn count(&mut self, usage: &Usage) {
        let sum = &mut self.usage;
        sum.prompt_tokens += usage.prompt_tokens;
        sum.cached_tokens += usage.cached_tokens;
        sum.completion_tokens += usage.completion_tokens;
        sum.hops += usage.hops;
        sum.by_model.resize(sum.by_model.len().max(usage.by_model.len()), 0);
        for (sum, count) in sum.by_model.iter_mut().zip(&usage.by_model) {
            *sum += count;
        }
    }

    /// Time to the first token, of the first hop, between tokens, and to the end, in milliseconds.
    pub fn latencies(&self) -> [Spread; 4] {
        [&self.first_token, &self.first_hop, &self.between_tokens, &self.whole]
            .map(|seconds| Spread::of(seconds.iter().map(|seconds| seconds * 1e3).collect()))
    }
}

/// Drives a runtime until its share of conversations is done.
///
/// # Errors
/// The first request that is refused or fails.
pub async fn drive(runtime: &Runtime, work: Work<'_>, models: usize) -> Result<Seen, CliError> {
    warm_up(runtime, work, models).await?;
    let (seen, enough) = (RefCell::new(Seen::default()), Notify::new());
    let goal = (work.conversations * work.sizes.turns * work.workers) as usize;
    let started = Instant::now();
    let worker = |number: u32| {
        let (seen, enough) = (&seen, &enough);
        async move {
            for conversation in 0_u64.. {
                let seed = work.seed_of(number, conversation);
                let mut said: Vec<TokenId> = Vec::new();
                for turn in 0..work.sizes.turns {
                    let prompt = work.prompt((seed, turn), &said);
                    let job = work.job((seed, turn), prompt);
                    let way = FirstHop::new(work.algorithm.entry(job.sampling.seed));
                    said = answer(runtime, job, (seen, way)).await?;
                    let mut seen = seen.borrow_mut();
                    if seen.whole.len() == goal {
                        seen.seconds = started.elapsed().as_secs_f64();
                        enough.notify_one();
                    }
                }
            }
            Ok::<(), CliError>(())
        }
    };
    let all = try_join_all((0..work.workers).map(worker));
    tokio::select! {
        biased;
        () = enough.notified() => {}
        end = all => { end?; }
    }
    Ok(seen.into_inner())
}

impl Work<'_> {
    /// The first job of every worker.
    pub fn opening(&self) -> Vec<Job> {
        let job = |number| {
            let seed = self.seed_of(number, 0);
            self.job((seed, 0), self.prompt((seed, 0), &[]))
        };
        (0..self.workers).map(job).collect()
    }

    /// What a model makes before the clock starts.
    pub fn warming(&self, model: ModelIdx) -> Job {
        let mut prompt = self.corpus.cut(0, 1);
        prompt.truncate(1);
        let mut job = self.job((self.seed, 0), prompt);
        job.target = Target::Only(model);
        (job.stop.max_tokens, job.stop.min_tokens) = (Some(WARM_UP), WARM_UP);
        job
    }

    fn seed_of(&self, number: u32, conversation: u64) -> u64 {
        mix(mix(self.seed ^ u64::from(number)) ^ conversation)
    }

    /// The conversation so far with something new at its end.
    fn prompt(&self, (seed, turn): (u64, u32), said: &[TokenId]) -> Vec<TokenId> {
        let length = self.sizes.prompt_at(turn) as usize;
        let new = self.corpus.cut(mix(seed ^ u64::from(turn)), length.saturating_sub(said.len()));
        said.iter().copied().chain(new).collect()
    }

    fn job(&self, (seed, turn): (u64, u32), prompt: Vec<TokenId>) -> Job {
        let output = self.sizes.output_at(turn);
        Job {
            prompt: Prompt::Ids(prompt),
            target: self.target,
            routing: None,
            sampling: SamplingParams {
                temperature: TEMPERATURE,
                seed: mix(seed ^ u64::from(turn) << 32),
                ..SamplingParams::default()
            },
            stop: StopRules { max_tokens: Some(output), min_tokens: output, ..StopRules::default() },
            logprobs: None,
            constraint: None,
            prompt_logprobs: None,
            entropy: false,
        }
    }
}

/// Watches a request for its first token from another model than the one where it began.
struct FirstHop {
    entry: ModelIdx,
    /// When the entry model's last token so far came.
    entered: Option<Duration>,
    done: bool,
}

impl FirstHop {
    fn new(entry: ModelIdx) -> FirstHop {
        FirstHop { entry, entered: None, done: false }
    }

    /// Tokens came; how long the first hop took if it was among them.
    fn arrived(&mut self, tokens: &[TokenReport], now: Duration) -> Option<Duration> {
        if self.done {
            return None;
        }
        let other = tokens.iter().position(|token| token.model != self.entry);
        self.done = other.is_some();
        if other.unwrap_or(tokens.len()) > 0 {
            self.entered = Some(now);
        }
        other.and(self.entered).map(|entered| now.saturating_sub(entered))
    }
}

/// Every model makes some tokens, so that its memory is there and its threads run.
///
/// # Errors
/// A request is refused or fails.
pub async fn warm_up(runtime: &Runtime, work: Work<'_>, models: usize) -> Result<(), CliError> {
    for job in (0..models).map(|model| work.warming(ModelIdx(model as u8))) {
        run::generate(runtime, job, |_, _| Ok(())).await?;
    }
    Ok(())
}

/// Runs a request to its end; the prompt with the answer.
async fn answer(
    runtime: &Runtime,
    job: Job,
    (seen, mut way): (&RefCell<Seen>, FirstHop),
) -> Result<Vec<TokenId>, CliError> {
    let Prompt::Ids(mut said) = job.prompt.clone() else {
        return Err(Failure::Internal("a bench prompt is made of tokens".into()).into());
    };
    let started = Instant::now();
    let mut events = runtime.submit(job).await?.events;
    let mut last: Option<Duration> = None;
    while let Some(event) = events.recv().await {
        let now = started.elapsed();
        let mut seen = seen.borrow_mut();
        match event {
            Event::Prompt(_) => {}
            Event::Delta { tokens, .. } => {
                seen.tokens += tokens.len() as u64;
                seen.first_hop.extend(way.arrived(&tokens, now).map(|gap| gap.as_secs_f64()));
                match last.replace(now) {
                    None => seen.first_token.push(now.as_secs_f64()),
                    Some(last) => seen.between_tokens.push((now - last).as_secs_f64()),
                }
                said.extend(tokens.iter().map(|token| token.id));
            }
            Event::Finished { usage, .. } => {
                seen.whole.push(now.as_secs_f64());
                seen.count(&usage);
                return Ok(said);
            }
            Event::Failed(failure) => return Err(failure.into()),
        }
    }
    Err(Failure::Internal("the answer ended without a reason".into()).into())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tokens(models: &[u8]) -> Vec<TokenReport> {
        let token =
            |&model: &u8| TokenReport { id: 0, model: ModelIdx(model), entropy: None, dropped: None, logprobs: None };
        models.iter().map(token).collect()
    }

    /// What the first hop took, ms, when tokens of these models came at these moments.
    fn first_hop(deliveries: &[(u64, &[u8])]) -> Vec<u128> {
        let mut way = FirstHop::new(ModelIdx(0));
        let arrived = |&(at, models): &(u64, &[u8])| way.arrived(&tokens(models), Duration::from_millis(at));
        deliveries.iter().filter_map(arrived).map(|gap| gap.as_millis()).collect()
    }

    #[test]
    fn a_first_hop_is_from_the_entry_models_last_token_to_anothers_first() {
        assert_eq!(first_hop(&[(5, &[0]), (7, &[0]), (37, &[1]), (40, &[0]), (99, &[1])]), [30]);
        assert_eq!(first_hop(&[(5, &[0, 0]), (6, &[]), (9, &[2]), (50, &[1])]), [4]);
        assert_eq!(first_hop(&[(5, &[0, 1]), (90, &[0]), (95, &[1])]), [0], "in one delivery");
        assert!(first_hop(&[(5, &[1]), (9, &[0]), (40, &[1])]).is_empty(), "the hop was before the first token");
        assert!(first_hop(&[(5, &[0]), (9, &[0])]).is_empty(), "no hop");
    }
}
