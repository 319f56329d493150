//! `tokenrouter label`: training data for learned routers. The large model answers greedily, the small model is
//! teacher-forced over the answers, and a judge says where its token would have led somewhere else. Owner: the process.
//! Invariant: features of a position are those of the step that produced the candidate there; a shard depends on its
//! problems and the settings alone, so a run that was cut short goes on where it stopped.
//!
//! The large model's continuation after its own token is its answer, which is greedy; only the continuation after the
//! small model's token is generated. (R2R, data labelling.)

mod drive;
mod judge;
pub mod shards;

use super::eval::problems::{self, Check, Problem};
use super::logs::{self, Talk};
use super::run::{self, load};
use super::{CliError, Context};
use crate::http::Served;
use crate::http::types::chat::{Message, Role};
use crate::launch::{self, LaunchError, Loaded, Overrides};
use drive::Driver;
use judge::{Case, Endpoint, Equal, Exact, Judge, Kind, Reach, Verdict, sentence_end};
use serde::Deserialize;
use serde_json::json;
use shards::{Folder, Labelled, Rows, Settings};
use std::io::{self, Write};
use std::path::PathBuf;
use tokenrouter_core::executor::{Drawn, Needs};
use tokenrouter_core::ids::TokenId;
use tokenrouter_core::job::Prompt;
use tokenrouter_core::text::TextCodec;

/// Options of `label`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// One JSON object a line with `question`, and for --judge exact with `answer`
    problems: PathBuf,
    /// Folder of the shards; one that was begun with the same options is continued
    #[arg(long, short, value_name = "FOLDER")]
    output: PathBuf,
    /// Who says whether a different token matters
    #[arg(long, value_enum, default_value = "exact")]
    judge: Kind,
    /// What counts as the answer for --judge exact
    #[arg(long, value_enum, default_value_t)]
    check: Check,
    /// Address of the judge, as in http://localhost:8000/v1
    #[arg(long, value_name = "URL", required_if_eq("judge", "endpoint"))]
    endpoint: Option<String>,
    /// Model that is asked there
    #[arg(long, value_name = "NAME", required_if_eq("judge", "endpoint"))]
    endpoint_model: Option<String>,
    /// The small model; without it the first one of the router
    #[arg(long, value_name = "NAME")]
    small: Option<String>,
    /// The large model; without it the last one of the router
    #[arg(long, value_name = "NAME")]
    large: Option<String>,
    /// Take only the first problems
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    limit: Option<u32>,
    /// Tokens of an answer at most
    #[arg(long, short = 'n', value_name = "N", default_value_t = 256, value_parser = clap::value_parser!(u32).range(1..))]
    max_tokens: u32,
    /// Highest logits that are kept of each position
    #[arg(long, value_name = "K", default_value_t = 100, value_parser = clap::value_parser!(u16).range(1..=4096))]
    top_k: u16,
    /// Problems in a shard
    #[arg(long, value_name = "N", default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..))]
    shard_problems: u32,
    /// Give the question as plain text, without the chat template
    #[arg(long)]
    raw: bool,
    /// Print one JSON object instead of text
    #[arg(long)]
    pub json: bool,
}

/// Runs the command.
pub fn run(context: &Context, args: &Args) -> Result<(), CliError> {
    context.common.without_params("nothing is routed while tokens are labelled")?;
    let judge = judge(args)?;
    let problems = questions(args)?;
    let file = launch::read(context.common.config.as_deref(), &Overrides::default(), &context.environment)?;
    logs::start(context, &file, Talk::Command)?;
    let loaded = load(context, file)?;
    let pair = Pair::of(&loaded, args)?;
    let prompts = prompts(&loaded, &problems, args.raw)?;
    let mut folder = Folder::open(&args.output, pair.settings(args, (&problems, &prompts)))?;
    let kept = folder.manifest.shards.len();
    let mut labeller = pair.labeller(args, &*judge)?;
    let shard = args.shard_problems as usize;
    let bar = context.progress.count("label", problems.len() as u64);
    for (index, (problems, prompts)) in problems.chunks(shard).zip(prompts.chunks(shard)).enumerate() {
        if index >= kept {
            folder.add(&labeller.label(index * shard, problems, prompts)?)?;
        }
        bar.inc(problems.len() as u64);
    }
    bar.finish_and_clear();
    let text = if args.json { summary_json(&folder, kept) } else { summary(&folder, kept) };
    Ok(io::stdout().write_all(text.as_bytes())?)
}

fn summary(folder: &Folder, kept: usize) -> String {
    let (counts, shards) = (folder.counts(), folder.manifest.shards.len());
    let share = |part: u64, whole: u64| 100.0 * part as f64 / whole.max(1) as f64;
    format!(
        "shards: {shards}, of which {kept} were there\npositions: {}\ndiffering: {} ({:.2} %)\ndivergent: {} ({:.2} %)\nnot judged: {}\n",
        counts.rows,
        counts.differing,
        share(counts.differing, counts.rows + counts.unknown),
        counts.divergent,
        share(counts.divergent, counts.rows),
        counts.unknown
    )
}

fn summary_json(folder: &Folder, kept: usize) -> String {
    let shards = folder.manifest.shards.len();
    format!("{}\n", json!({ "shards": shards, "shards_kept": kept, "counts": folder.counts() }))
}

fn judge(args: &Args) -> Result<Box<dyn Judge>, CliError> {
    match (args.judge, &args.endpoint, &args.endpoint_model) {
        (Kind::Endpoint, Some(url), Some(model)) => Ok(Box::new(Endpoint::new(url, model.clone()))),
        (Kind::Exact, None, None) => Ok(Box::new(Exact(args.check))),
        (Kind::Equal, None, None) => Ok(Box::new(Equal)),
        _ => Err(CliError::Usage("--endpoint and --endpoint-model go with --judge endpoint".into())),
    }
}

/// The problems; where the judge needs no answers, lines may go without.
fn questions(args: &Args) -> Result<Vec<Problem>, CliError> {
    if args.judge == Kind::Exact {
        return problems::read(&args.problems, args.limit);
    }
    #[derive(Deserialize)]
    struct Line {
        question: String,
    }
    let usage = |reason: String| CliError::Usage(format!("{}{reason}", args.problems.display()));
    let text = std::fs::read_to_string(&args.problems).map_err(|error| usage(format!(": {error}")))?;
    let lines = text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty());
    let limit = args.limit.map_or(usize::MAX, |limit| limit as usize);
    let read = |(number, line): (usize, &str)| match serde_json::from_str(line) {
        Ok(Line { question }) => Ok(Problem { question, ..Problem::default() }),
        Err(error) => Err(usage(format!(":{}: {error}; each line is {{\"question\": \"…\"}}", number + 1))),
    };
    let problems: Vec<Problem> = lines.take(limit).map(read).collect::<Result<_, _>>()?;
    if problems.is_empty() { Err(usage(": holds no problem".into())) } else { Ok(problems) }
}

/// Tokens of all prompts, as the routed name would put them.
fn prompts(loaded: &Loaded, problems: &[Problem], raw: bool) -> Result<Vec<Vec<TokenId>>, CliError> {
    let served = launch::served(loaded);
    let served: &Served = served.first().ok_or_else(|| CliError::Usage("nothing is served".into()))?;
    let tokenizer = &loaded.text().tokenizer;
    let tokens = |problem: &Problem| {
        let prompt = if raw {
            run::raw_prompt(&problem.question)
        } else {
            run::chat_prompt(served, &[Message::new(Role::User, problem.question.as_str())])?
        };
        match prompt {
            Prompt::Ids(ids) => Ok(ids),
            Prompt::Text { text, special, add_bos: true } => tokenizer.encode_prompt(&text, special),
            Prompt::Text { text, special, add_bos: false } => tokenizer.encode(&text, special),
        }
        .map_err(|error| CliError::Usage(error.to_string()))
    };
    problems.iter().map(tokens).collect()
}

/// The two models, by index.
struct Pair<'a> {
    loaded: &'a Loaded,
    small: usize,
    large: usize,
}

impl<'a> Pair<'a> {
    fn of(loaded: &'a Loaded, args: &Args) -> Result<Pair<'a>, CliError> {
        let names = loaded.names();
        let index = |option: &str, name: &Option<String>, default: usize| match name {
            None => Ok(default),
            Some(name) => names.iter().position(|known| known == name).ok_or_else(|| {
                CliError::Usage(format!("{option} {name} is none of the models; known: {}", names.join(", ")))
            }),
        };
        let small = index("--small", &args.small, 0)?;
        let large = index("--large", &args.large, names.len() - 1)?;
        if small == large {
            return Err(CliError::Usage(format!("small and large model are both {}; name two", names[small])));
        }
        Ok(Pair { loaded, small, large })
    }

    fn labeller<'b>(&'b self, args: &Args, judge: &'b dyn Judge) -> Result<Labeller<'b>, CliError> {
        Ok(Labeller {
            small: self.driver(self.small)?,
            large: self.driver(self.large)?,
            eos: &self.loaded.members[self.large].model.info().eos,
            codec: &*self.loaded.members[self.large].text.tokenizer,
            needs: Needs { hidden: true, top_k: args.top_k, ..Needs::default() },
            max_tokens: args.max_tokens as usize,
            judge,
        })
    }

    fn driver(&self, index: usize) -> Result<Driver, CliError> {
        let member = &self.loaded.members[index];
        let failed = |reason| LaunchError::Load { model: member.name.clone(), reason: Box::new(reason) };
        Ok(Driver::new(Box::new(member.model.executor().map_err(failed)?)))
    }

    fn settings(&self, args: &Args, (problems, prompts): (&[Problem], &[Vec<TokenId>])) -> Settings {
        let bytes = problems.iter().zip(prompts).flat_map(|(problem, prompt)| {
            let tokens = prompt.iter().flat_map(|token| token.to_le_bytes());
            tokens.chain(problem.answer.bytes()).chain([0])
        });
        let hash = bytes
            .fold(0xcbf2_9ce4_8422_2325u64, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3));
        let [small, large] = [self.small, self.large].map(|index| &self.loaded.members[index]);
        let (small_info, large_info) = (small.model.info(), large.model.info());
        let asked = match (&args.endpoint, &args.endpoint_model, args.judge) {
            (Some(url), Some(model), Kind::Endpoint) => format!(" {url} {model}"),
            (_, _, Kind::Exact) => format!(" {:?}", args.check),
            _ => String::new(),
        };
        Settings {
            small: small.name.clone(),
            small_parameters: small_info.parameters,
            large: large.name.clone(),
            large_parameters: large_info.parameters,
            hidden_size: small.model.config().hidden,
            top_k: usize::from(args.top_k).min(small_info.vocab_width as usize),
            judge: format!("{}{asked}", args.judge.name()),
            max_tokens: args.max_tokens as usize,
            shard_problems: args.shard_problems as usize,
            problems: problems.len(),
            fingerprint: format!("{hash:016x}"),
        }
    }
}

/// What makes a shard.
struct Labeller<'a> {
    small: Driver,
    large: Driver,
    eos: &'a [TokenId],
    codec: &'a dyn TextCodec,
    needs: Needs,
    max_tokens: usize,
    judge: &'a dyn Judge,
}

/// A position where the models differ.
struct Difference {
    problem: usize,
    position: usize,
}

impl Labeller<'_> {
    /// Labels problems, the first of which has index `first` in the whole file.
    fn label(&mut self, first: usize, problems: &[Problem], prompts: &[Vec<TokenId>]) -> Result<Rows, CliError> {
        let answers = self.answers(prompts)?;
        let traces = self.traces(prompts, &answers)?;
        let mut differences = Vec::new();
        for (problem, (answer, trace)) in answers.iter().zip(&traces).enumerate() {
            let differing = answer.iter().zip(trace).enumerate().filter(|(_, (large, drawn))| **large != drawn.token);
            differences.extend(differing.map(|(position, _)| Difference { problem, position }));
        }
        let continuations = self.continuations(prompts, (&answers, &traces, &differences))?;
        let mut verdicts = Vec::with_capacity(differences.len());
        for (difference, continuation) in differences.iter().zip(&continuations) {
            let (before, large) = answers[difference.problem].split_at(difference.position);
            let cut = |tokens: &[TokenId]| self.reached(self.text(tokens));
            let Problem { question, answer, .. } = &problems[difference.problem];
            verdicts.push(self.judge.verdict(Case {
                question,
                right: answer,
                before: &self.text(before),
                large: &cut(large),
                small: &cut(continuation),
            })?);
        }
        Ok(rows(first, (&answers, &traces), differences.iter().zip(verdicts)))
    }

    /// The large model's greedy answers, end of text included.
    fn answers(&mut self, prompts: &[Vec<TokenId>]) -> Result<Vec<Vec<TokenId>>, CliError> {
        let context = self.small.context_len().min(self.large.context_len());
        let mut answers = vec![Vec::new(); prompts.len()];
        self.large.run(prompts, Needs::default(), |index, drawn| {
            let answer = &mut answers[index];
            answer.push(drawn.token);
            let room = answer.len() < self.max_tokens && prompts[index].len() + answer.len() < context;
            (room && !self.eos.contains(&drawn.token)).then_some(drawn.token)
        })?;
        Ok(answers)
    }

    /// The small model's candidate and signals at every position of the answers: entry t stands against token t, and is
    /// from the step that consumed token t - 1.
    fn traces(&mut self, prompts: &[Vec<TokenId>], answers: &[Vec<TokenId>]) -> Result<Vec<Vec<Drawn>>, CliError> {
        let mut traces: Vec<Vec<Drawn>> = answers.iter().map(|_| Vec::new()).collect();
        self.small.run(prompts, self.needs, |index, drawn| {
            traces[index].push(drawn);
            let (seen, answer) = (traces[index].len(), &answers[index]);
            if seen < answer.len() { Some(answer[seen - 1]) } else { None }
        })?;
        Ok(traces)
    }

    /// The large model's continuations after the small model's tokens, those tokens first.
    fn continuations(
        &mut self,
        prompts: &[Vec<TokenId>],
        (answers, traces, differences): (&[Vec<TokenId>], &[Vec<Drawn>], &[Difference]),
    ) -> Result<Vec<Vec<TokenId>>, CliError> {
        let candidate = |at: &Difference| traces[at.problem][at.position].token;
        let mut continuations: Vec<Vec<TokenId>> = differences.iter().map(|at| vec![candidate(at)]).collect();
        let (mut prefixes, mut whose) = (Vec::new(), Vec::new());
        for (index, at) in differences.iter().enumerate().filter(|(_, at)| !self.eos.contains(&candidate(at))) {
            let mut prefix = prompts[at.problem].clone();
            prefix.extend_from_slice(&answers[at.problem][..at.position]);
            prefix.push(candidate(at));
            prefixes.push(prefix);
            whose.push(index);
        }
        let (eos, codec, reach) = (self.eos, self.codec, self.judge.reach());
        let max_tokens = self.max_tokens;
        self.large.run(&prefixes, Needs::default(), |index, drawn| {
            let continuation = &mut continuations[whose[index]];
            continuation.push(drawn.token);
            let room = differences[whose[index]].position + continuation.len() < max_tokens;
            let goes_on = room && !eos.contains(&drawn.token);
            let open = || reach == Reach::Text || sentence_end(&text(codec, continuation)).is_none();
            (goes_on && open()).then_some(drawn.token)
        })?;
        Ok(continuations)
    }

    fn text(&self, tokens: &[TokenId]) -> String {
        text(self.codec, tokens)
    }

    /// The part of a continuation that the judge wants.
    fn reached(&self, mut text: String) -> String {
        if self.judge.reach() == Reach::Sentence
            && let Some(end) = sentence_end(&text)
        {
            text.truncate(end);
        }
        text
    }
}

/// The text of tokens; control tokens do not show.
fn text(codec: &dyn TextCodec, tokens: &[TokenId]) -> String {
    let shown = tokens.iter().filter(|&&token| !codec.is_special(token));
    let bytes: Vec<u8> = shown.filter_map(|&token| codec.token_bytes(token)).flatten().copied().collect();
    String::from_utf8_lossy(&bytes).into_owned()
}

/// All positions with a label, in order; `verdicts` has one entry for each position where the models differ, in order.
fn rows<'a>(
    first: usize,
    (answers, traces): (&[Vec<TokenId>], &[Vec<Drawn>]),
    verdicts: impl Iterator<Item = (&'a Difference, Verdict)>,
) -> Rows {
    let mut rows = Rows::default();
    let mut verdicts = verdicts.peekable();
    for (problem, (answer, trace)) in answers.iter().zip(traces).enumerate() {
        for (position, (&large, drawn)) in answer.iter().zip(trace).enumerate() {
            let here = verdicts.next_if(|(at, _)| (at.problem, at.position) == (problem, position));
            rows.counts.differing += u64::from(here.is_some());
            let label = match here {
                Some((_, Verdict::Unknown)) => {
                    rows.counts.unknown += 1;
                    continue;
                }
                Some((_, Verdict::Divergent)) => 1,
                Some((_, Verdict::Neutral)) | None => 0,
            };
            rows.counts.divergent += u64::from(label);
            rows.push(&Labelled {
                signals: &drawn.signals,
                candidate: drawn.token,
                large,
                label,
                problem: (first + problem) as u32,
                position: position as u32,
            });
        }
    }
    rows
}

#[cfg(test)]
mod tests;
