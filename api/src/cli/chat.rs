//! `tokenrouter chat`: a conversation on the terminal, streamed. Owner: the process. Invariant: what the models see is
//! the conversation as the chat template writes it; an answer that was cut short is kept as far as it came.

use super::generate::summary;
use super::logs::{self, Talk};
use super::options::{self, Color, Generation};
use super::paint::Painter;
use super::run::{chat_prompt, generate, load};
use super::{CliError, Context};
use crate::http::Served;
use crate::http::types::chat::{Message, Role};
use crate::launch::{self, Loaded};
use std::io::{self, BufRead, IsTerminal, Write};
use std::time::Duration;
use tokenrouter_actors::runtime::Runtime;
use tokenrouter_core::job::{Job, StopRules};
use tokio::sync::mpsc;

const HELP: &str = "/reset forgets the conversation, /quit ends, Ctrl-C stops an answer";

/// Options of `chat`.
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(flatten)]
    generation: Generation,
    /// Instructions that come before the conversation
    #[arg(long, value_name = "TEXT")]
    system: Option<String>,
    /// Colour the text by model
    #[arg(long, value_enum, default_value_t, value_name = "WHEN")]
    color: Color,
}

/// Runs the command.
pub fn run(context: &Context, args: &Args) -> Result<(), CliError> {
    let file = launch::read(context.common.config.as_deref(), &context.common.overrides()?, &context.environment)?;
    logs::start(context, &file, Talk::Command)?;
    let loaded = load(context, file)?;
    let served = launch::served(&loaded);
    let served = options::served(&served, args.generation.model.as_deref())?;
    let system: Vec<Message> = args.system.iter().map(|content| Message::new(Role::System, content.as_str())).collect();
    chat_prompt(served, &[&system[..], &[Message::new(Role::User, "hello")]].concat())?;
    let interactive = io::stdin().is_terminal();
    if interactive {
        eprintln!("talking to {} ({HELP})", served.id);
    }
    actix_rt::System::new().block_on(async {
        let runtime = loaded.start()?;
        context.interrupts.are_mine();
        let talk = Talking {
            loaded: &loaded,
            served,
            runtime: &runtime,
            args,
            color: args.color.wanted(context.environment.no_color),
            quiet: context.common.quiet || !interactive,
        };
        let result = converse(&talk, system, interactive).await;
        runtime.drain(Duration::ZERO).await;
        result
    })
}

/// Lines typed by the user; the thread ends with the process or with its input.
fn lines() -> mpsc::Receiver<io::Result<String>> {
    let (sender, receiver) = mpsc::channel(1);
    std::thread::spawn(move || {
        for line in io::stdin().lock().lines() {
            if sender.blocking_send(line).is_err() {
                break;
            }
        }
    });
    receiver
}

async fn converse(talk: &Talking<'_>, system: Vec<Message>, interactive: bool) -> Result<(), CliError> {
    let mut typed = lines();
    let mut messages = system.clone();
    loop {
        if interactive {
            eprint!("> ");
        }
        let line = tokio::select! {
            line = typed.recv() => line,
            _ = tokio::signal::ctrl_c() => None,
        };
        let Some(line) = line.transpose()? else {
            if interactive {
                eprintln!();
            }
            return Ok(());
        };
        match line.trim() {
            "" => continue,
            "/quit" | "/exit" => return Ok(()),
            "/reset" => messages.clone_from(&system),
            "/help" => eprintln!("{HELP}"),
            command if command.starts_with('/') && !command.contains(' ') => eprintln!("{command} is unknown: {HELP}"),
            _ => {
                messages.push(Message::new(Role::User, line));
                match talk.answer(&messages).await {
                    Ok(answer) => messages.push(Message::new(Role::Assistant, answer)),
                    Err(CliError::Io(error)) => return Err(error.into()),
                    Err(error) => {
                        messages.pop();
                        eprintln!("error: {error}");
                        if matches!(error, CliError::Refused(_)) {
                            eprintln!("/reset starts a new conversation");
                        }
                    }
                }
            }
        }
    }
}

struct Talking<'a> {
    loaded: &'a Loaded,
    served: &'a Served,
    runtime: &'a Runtime,
    args: &'a Args,
    color: bool,
    quiet: bool,
}

impl Talking<'_> {
    /// Streams the answer to the conversation so far and returns its text.
    async fn answer(&self, messages: &[Message]) -> Result<String, CliError> {
        let generation = &self.args.generation;
        let stop =
            StopRules { max_tokens: generation.max_tokens, stop: generation.stop.clone(), ..StopRules::default() };
        let job = Job {
            prompt: chat_prompt(self.served, messages)?,
            target: self.served.target,
            routing: None,
            sampling: generation.sampling(self.served.defaults),
            stop,
            logprobs: None,
            constraint: None,
            prompt_logprobs: None,
            entropy: false,
        };
        let codec = self.loaded.codec();
        let mut painter = Painter::new(self.color);
        let mut said = String::new();
        let show = |text: &str, tokens: &[_]| {
            said.push_str(text);
            let mut out = io::stdout().lock();
            out.write_all(painter.paint(text, tokens, codec.as_ref()).as_bytes())?;
            out.flush()
        };
        // Leaving the generation behind drops its stream, which aborts it at every model.
        let outcome = tokio::select! {
            outcome = generate(self.runtime, job, show) => Some(outcome?),
            _ = tokio::signal::ctrl_c() => None,
        };
        println!();
        if let Some(outcome) = outcome.filter(|_| !self.quiet) {
            eprintln!("{}", summary(&outcome, self.loaded, self.color));
        }
        Ok(said)
    }
}
