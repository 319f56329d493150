//! Where a bench runs: models in memory, or simulated ones. Owner: the command. Invariant: weights are read once; every
//! row of every round gets a runtime of its own with empty KV memory, so none finds what another left.

use super::rows::Row;
use super::shape::Corpus;
use super::simulated::Simulated;
use crate::cli::eval::{self, problems::Problem};
use crate::cli::{CliError, Context, run};
use crate::http::types::chat::{Message, Role};
use crate::launch::{self, Loaded};
use std::path::Path;
use std::sync::Arc;
use tokenrouter_actors::runtime::Runtime;
use tokenrouter_config::{Batching, LaunchFile};
use tokenrouter_core::executor::PAGE_TOKENS;
use tokenrouter_core::ids::TokenId;
use tokenrouter_core::job::Prompt;
use tokenrouter_core::routing::Algorithm;
use tokenrouter_core::text::SpecialTokens;

/// What runs.
pub enum Stage {
    /// Models in memory, with the `[batching]` of the launch file.
    Weights(Box<Loaded>, Batching),
    /// Models that only take their time.
    Simulated(Simulated),
}

impl Stage {
    /// Reads the weights of a launch file for so many requests at once. The server accepts twice as many, whatever the file
    /// says: thresholds are planned for each number that it accepts.
    ///
    /// # Errors
    /// The launch file or a model is wrong.
    pub fn load(context: &Context, mut file: LaunchFile, workers: u32) -> Result<Stage, CliError> {
        file.server.live_max = workers * 2;
        let loaded = run::load(context, file)?;
        let batching = loaded.file.batching.clone();
        Ok(Stage::Weights(Box::new(loaded), batching))
    }

    /// Starts a runtime for a row. Must be called within an actix system.
    ///
    /// # Errors
    /// The runtime refuses a setting.
    pub fn start(&mut self, row: Row) -> Result<Runtime, CliError> {
        match self {
            Stage::Weights(loaded, configured) => {
                loaded.file.batching = row.batching(configured);
                loaded.members.iter().for_each(|member| member.model.play_graphs(row.plays_graphs()));
                Ok(loaded.start()?)
            }
            Stage::Simulated(pair) => pair.start(row),
        }
    }

    /// Whether a model plays recorded steps, so that it makes a difference when none does.
    pub fn has_graphs(&self) -> bool {
        match self {
            Stage::Weights(loaded, _) => {
                loaded.file.models.iter().any(|model| model.cuda.as_ref().is_some_and(|cuda| cuda.graphs))
            }
            Stage::Simulated(_) => false,
        }
    }

    /// Names of the models.
    pub fn names(&self) -> Vec<String> {
        match self {
            Stage::Weights(loaded, _) => loaded.names(),
            Stage::Simulated(pair) => pair.names(),
        }
    }

    /// How requests are routed.
    pub fn algorithm(&self) -> Arc<dyn Algorithm> {
        match self {
            Stage::Weights(loaded, _) => loaded.algorithm.clone(),
            Stage::Simulated(pair) => pair.algorithm.clone(),
        }
    }

    /// How requests are routed, in words.
    pub fn routing(&self) -> String {
        match self {
            Stage::Weights(loaded, _) => {
                let params = &loaded.file.router.params;
                let params: Vec<String> = params.iter().map(|(name, value)| format!("{name} = {value}")).collect();
                format!("{} {}", loaded.file.router.algorithm, params.join(", ")).trim_end().to_owned()
            }
            Stage::Simulated(pair) => format!("bernoulli p = {}", pair.algorithm.prior().p[0][1]),
        }
    }

    /// How the full row holds requests back, in words.
    pub fn policy(&self, workers: &[u32]) -> String {
        match self {
            Stage::Weights(_, configured) => Row::Full.batching(configured).policy.name().to_owned(),
            Stage::Simulated(pair) => {
                let each = workers.iter().map(|&n| format!("B = {:?} for N = {n}", pair.thresholds(n)));
                format!("optimal: {}", each.collect::<Vec<_>>().join(", "))
            }
        }
    }

    /// Tokens per second that the throughput model expects, where it knows.
    pub fn predicted(&self, row: Row, workers: u32) -> Option<f64> {
        match self {
            Stage::Weights(..) => None,
            Stage::Simulated(pair) => pair.predicted(row, workers),
        }
    }

    /// What prompts are cut from: the texts of the embedded problems in the models' own tokens, or any words.
    ///
    /// # Errors
    /// The problems cannot be laid out, or the tokenizer refuses them.
    pub fn corpus(&self, context: &Context) -> Result<Corpus, CliError> {
        let loaded = match self {
            Stage::Simulated(pair) => return Ok(pair.corpus()),
            Stage::Weights(loaded, _) => loaded,
        };
        let file = launch::embedded::lay_out(&context.environment.cache)?.join(launch::embedded::PROBLEMS);
        let problems = eval::problems::read(&file, None)?;
        let text: Vec<String> = problems.iter().map(|problem| problem.question.clone()).collect();
        let text = Prompt::Text { text: text.join("\n"), special: SpecialTokens::AsText, add_bos: false };
        tokens(loaded, text).map(Corpus::Ring)
    }

    /// The questions of a file as prompts, laid out as the models' chat template says where they have one.
    ///
    /// # Errors
    /// The file is not one of questions, or the template or tokenizer refuses one.
    pub fn questions(&self, path: &Path) -> Result<Corpus, CliError> {
        let Stage::Weights(loaded, _) = self else {
            return Err(CliError::Usage("--prompts: simulated models read no text".to_owned()));
        };
        let served = launch::served(loaded);
        let prompt = |problem: Problem| {
            let text = problem.question;
            let prompt = match served.first().filter(|served| served.chat.is_some()) {
                Some(served) => run::chat_prompt(served, &[Message::new(Role::User, text)])?,
                None => run::raw_prompt(&text),
            };
            tokens(loaded, prompt)
        };
        let prompts = eval::problems::read(path, None)?.into_iter().map(prompt);
        prompts.collect::<Result<_, _>>().map(Corpus::Whole)
    }

    /// Checks that sequences of `longest` tokens fit every model.
    ///
    /// # Errors
    /// Names the model and the remedy.
    pub fn fits(&self, longest: u32) -> Result<(), CliError> {
        let Stage::Weights(loaded, _) = self else { return Ok(()) };
        for member in &loaded.members {
            let limits = member.model.limits();
            let room = limits.context_len.min(limits.pages.saturating_mul(PAGE_TOKENS as u32));
            if longest > room {
                return Err(CliError::Usage(format!(
                    "a request of this shape has {longest} tokens but model {} holds {room}; lower --scale",
                    member.name
                )));
            }
        }
        Ok(())
    }

    /// Live requests whose KV memory every model holds at once; more of them wait for memory.
    pub fn holds(&self, longest: u32) -> u32 {
        let Stage::Weights(loaded, _) = self else { return u32::MAX };
        let pages = longest.div_ceil(PAGE_TOKENS as u32).max(1);
        loaded.members.iter().map(|member| member.model.limits().pages / pages).min().unwrap_or(0)
    }
}

/// A prompt in the models' tokens.
fn tokens(loaded: &Loaded, prompt: Prompt) -> Result<Vec<TokenId>, CliError> {
    let (text, special, add_bos) = match prompt {
        Prompt::Ids(tokens) => return Ok(tokens),
        Prompt::Text { text, special, add_bos } => (text, special, add_bos),
    };
    let codec = loaded.codec();
    let tokens = if add_bos { codec.encode_prompt(&text, special) } else { codec.encode(&text, special) };
    tokens.map_err(|error| CliError::Usage(format!("a prompt of the bench: {error}")))
}
