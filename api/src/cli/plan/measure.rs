//! Is the prediction true? Runs N requests of a fixed length under given thresholds, counts tokens per second, and looks at
//! which ways the requests went and how long the steps took.
//! Owner: the command. Invariant: only the time in which all N requests are past their prompts and none has ended counts,
//! for that is the closed system that was planned for.

use crate::cli::CliError;
use crate::cli::counted::{Counted, Seen};
use crate::launch::{self, Loaded};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokenrouter_config::Policy;
use tokenrouter_core::executor::PAGE_TOKENS;
use tokenrouter_core::ids::TokenId;
use tokenrouter_core::job::{Event, Failure, Job, Prompt, StopRules};
use tokenrouter_core::rng::mix;
use tokenrouter_core::theory::observe::Total;

/// Tokens of a prompt; they are random.
const PROMPT: u32 = 64;
/// Tokens of each request that do not count: by then every model has seen the prompt, unless it is asked for less than
/// one token in ten.
const WARM_UP: u32 = 48;

/// A run to be made.
#[derive(Clone, Copy, Debug)]
pub struct Trial<'a> {
    /// N.
    pub requests: u32,
    /// B, in the router's order.
    pub thresholds: &'a [u32],
    /// Tokens of each request.
    pub tokens: u32,
    /// What prompts, routing and sampling are drawn from.
    pub seed: u64,
}

/// What came of it.
#[derive(Clone, Debug)]
pub struct Run {
    /// Of all requests together.
    pub tokens_per_second: f64,
    /// Where the requests of each model went.
    pub seen: Vec<Seen>,
    /// `[i][b - 1]`: the steps of model i with b requests, others beside them or not.
    pub steps: Vec<Vec<Total>>,
}

/// Runs it.
///
/// # Errors
/// [`CliError`] when a request is refused or breaks off, and for runs too short to have a time that counts.
pub fn measure(loaded: &mut Loaded, trial: Trial<'_>) -> Result<Run, CliError> {
    let batching = &mut loaded.file.batching;
    (batching.policy, batching.profile) = (Policy::Fixed, None);
    batching.thresholds = loaded.file.router.models.iter().cloned().zip(trial.thresholds.iter().copied()).collect();
    // Long enough that thresholds alone decide.
    batching.max_wait_ms = 60_000;
    let jobs = jobs(loaded, trial)?;
    let counted = Arc::new(Counted::new(loaded.algorithm.clone(), loaded.members.len()));
    let (streams, steps) = actix_rt::System::new().block_on(async {
        let runtime = loaded.start_with(counted.clone())?;
        let streams = jobs.into_iter().map(|job| {
            let runtime = runtime.clone();
            async move { watch(&runtime, job).await }
        });
        let streams = futures_util::future::try_join_all(streams).await?;
        let models = runtime.snapshot().models;
        runtime.drain(Duration::from_secs(1)).await;
        Ok::<_, CliError>((streams, models.into_iter().map(|model| model.decode.totals.to_vec()).collect()))
    })?;
    let tokens_per_second = rate(&streams).ok_or_else(|| {
        CliError::Usage(format!("--measure {}: the runs were too short; give more tokens", trial.tokens))
    })?;
    Ok(Run { tokens_per_second, seen: counted.seen(&loaded.names()), steps })
}

fn jobs(loaded: &Loaded, trial: Trial<'_>) -> Result<Vec<Job>, CliError> {
    let served = launch::served(loaded);
    let served = served.first().ok_or_else(|| CliError::Usage("nothing is served".into()))?;
    let vocab = u64::from(loaded.codec().vocab_size().max(1));
    let need = (PROMPT + trial.tokens).div_ceil(PAGE_TOKENS as u32) * trial.requests;
    for member in &loaded.members {
        let pages = member.model.limits().pages;
        if pages < need {
            let (name, tokens) = (&member.name, need * PAGE_TOKENS as u32);
            return Err(CliError::Usage(format!(
                "--measure: {} requests need kv memory for {tokens} tokens at model {name}; raise its kv_tokens",
                trial.requests
            )));
        }
    }
    let job = |request: u32| {
        let seed = mix(trial.seed ^ u64::from(request) << 32);
        let token = |at: u32| (mix(seed.wrapping_add(u64::from(at))) % vocab) as TokenId;
        Job {
            prompt: Prompt::Ids((0..PROMPT).map(token).collect()),
            target: served.target,
            routing: None,
            sampling: tokenrouter_core::sampling::SamplingParams { seed, ..Default::default() },
            stop: StopRules { max_tokens: Some(trial.tokens), ignore_eos: true, ..StopRules::default() },
            logprobs: None,
            constraint: None,
            prompt_logprobs: None,
            entropy: false,
        }
    };
    Ok((0..trial.requests).map(job).collect())
}

/// When how many tokens came.
type Stream = Vec<(Instant, u32)>;

async fn watch(runtime: &tokenrouter_actors::runtime::Runtime, job: Job) -> Result<Stream, CliError> {
    let mut events = runtime.submit(job).await?.events;
    let mut stream = Vec::new();
    while let Some(event) = events.recv().await {
        match event {
            Event::Delta { tokens, .. } if !tokens.is_empty() => stream.push((Instant::now(), tokens.len() as u32)),
            Event::Prompt(_) | Event::Delta { .. } => {}
            Event::Finished { .. } => return Ok(stream),
            Event::Failed(failure) => return Err(failure.into()),
        }
    }
    Err(Failure::Internal("the answer ended without a reason".into()).into())
}

/// Tokens per second between the moment when the last request is past its warm-up and the end of the first.
fn rate(streams: &[Stream]) -> Option<f64> {
    let warm = |stream: &Stream| {
        let mut sum = 0;
        let at = stream.iter().find(|(_, tokens)| {
            sum += tokens;
            sum >= WARM_UP
        });
        at.map(|(at, _)| *at)
    };
    let begin = streams.iter().map(warm).collect::<Option<Vec<_>>>()?.into_iter().max()?;
    let end = streams.iter().map(|stream| stream.last().map(|(at, _)| *at)).collect::<Option<Vec<_>>>()?;
    let end = end.into_iter().min()?;
    let counted = streams.iter().flatten().filter(|(at, _)| begin < *at && *at <= end);
    let tokens: u32 = counted.map(|(_, tokens)| tokens).sum();
    let seconds = end.checked_duration_since(begin)?.as_secs_f64();
    (seconds > 0.0 && tokens > 0).then(|| f64::from(tokens) / seconds)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_time_with_all_requests_counts() {
        let start = Instant::now();
        let stream = |from: u64, step: u64, count: u64| -> Stream {
            (1..=count).map(|n| (start + Duration::from_millis(from + n * step), 1)).collect()
        };
        // One token each 10 ms from 0 to 2 s, and one each 20 ms from 0.1 s to 4.1 s: both run from 1.06 s to 2 s.
        let both = rate(&[stream(0, 10, 200), stream(100, 20, 200)]).expect("a rate");
        assert!((both - 150.0).abs() < 2.0, "{both}");
        assert_eq!(rate(&[stream(0, 10, 5)]), None, "never past the warm-up");
        assert_eq!(rate(&[stream(0, 10, 20), stream(5000, 10, 100)]), None, "never together");
    }
}
