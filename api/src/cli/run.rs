//! One generation in this process, without HTTP. Owner: the command. Invariant: the outcome is built from the same events
//! that HTTP streams.

use super::{CliError, Context};
use crate::http::Served;
use crate::http::types::chat::{Conversation, Message};
use crate::launch::{self, Loaded};
use std::io;
use std::time::{Duration, Instant};
use tokenrouter_actors::runtime::Runtime;
use tokenrouter_config::LaunchFile;
use tokenrouter_core::job::{Event, Failure, FinishReason, Job, Prompt, TokenReport, Usage};
use tokenrouter_core::text::SpecialTokens;

/// Reads the launch file and loads its models.
pub fn load(context: &Context, file: LaunchFile) -> Result<Loaded, CliError> {
    let plan = launch::prepare(file, &context.environment, &context.progress)?;
    Ok(Loaded::new(plan, &context.progress)?)
}

/// What a generation gave.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// The answer.
    pub text: String,
    /// Its tokens, the end-of-text token included.
    pub tokens: Vec<TokenReport>,
    /// Why it ended.
    pub reason: FinishReason,
    /// Totals.
    pub usage: Usage,
    /// From submission to the first token.
    pub first_token: Duration,
    /// From submission to the end.
    pub total: Duration,
}

impl Outcome {
    /// Tokens per second over the whole generation.
    pub fn tokens_per_second(&self) -> f64 {
        f64::from(self.usage.completion_tokens) / self.total.as_secs_f64().max(1e-9)
    }
}

/// Runs a job to its end; `show` sees text and tokens as they come.
pub async fn generate(
    runtime: &Runtime,
    job: Job,
    mut show: impl FnMut(&str, &[TokenReport]) -> io::Result<()>,
) -> Result<Outcome, CliError> {
    let started = Instant::now();
    let mut events = runtime.submit(job).await?.events;
    let (mut text, mut tokens, mut first_token) = (String::new(), Vec::new(), None);
    while let Some(event) = events.recv().await {
        match event {
            Event::Prompt(_) => {}
            Event::Delta { text: new, tokens: more } => {
                if !more.is_empty() {
                    first_token.get_or_insert_with(|| started.elapsed());
                }
                show(&new, &more)?;
                text.push_str(&new);
                tokens.extend(more);
            }
            Event::Finished { reason, usage, .. } => {
                let total = started.elapsed();
                let first_token = first_token.unwrap_or(total);
                return Ok(Outcome { text, tokens, reason, usage, first_token, total });
            }
            Event::Failed(failure) => return Err(failure.into()),
        }
    }
    Err(Failure::Internal("the answer ended without a reason".into()).into())
}

/// The prompt of a conversation, as the served model's chat template writes it.
pub fn chat_prompt(served: &Served, messages: &[Message]) -> Result<Prompt, CliError> {
    let template = served.chat.as_ref().ok_or_else(|| {
        CliError::Usage(format!(
            "model {} has no chat template; use generate --raw, which continues plain text",
            served.id
        ))
    })?;
    let conversation = Conversation::of(messages.to_vec());
    template.prompt(&conversation).map_err(CliError::Usage)
}

/// The prompt that is the text itself.
pub fn raw_prompt(text: &str) -> Prompt {
    Prompt::Text { text: text.to_owned(), special: SpecialTokens::Parse, add_bos: true }
}
