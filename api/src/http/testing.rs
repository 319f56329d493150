//! Stand-ins for tests of this folder: a byte vocabulary, scripted events, a scripted engine.

use super::engine::Engine;
use super::types::chat::Conversation;
use super::{App, ChatTemplate, Limits, Parts, Router, Served};
use futures_util::future::{FutureExt, LocalBoxFuture};
use std::collections::VecDeque;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokenrouter_actors::runtime::{ModelSnapshot, Reply, RuntimeSnapshot};
use tokenrouter_core::executor::TokenLogprobs;
use tokenrouter_core::ids::{ModelIdx, RequestId, Time, TokenId};
use tokenrouter_core::job::{Event, FinishReason, Job, Prompt, Refusal, Target, TokenReport, Usage};
use tokenrouter_core::routing;
use tokenrouter_core::text::{SpecialTokens, TextCodec, TextError};
use tokio::sync::mpsc;

/// A token is a byte; 256 ends the text.
pub struct ByteCodec;

impl ByteCodec {
    /// End-of-text.
    pub const EOS: TokenId = 256;
}

static BYTES: [u8; 256] = {
    let mut bytes = [0; 256];
    let mut at = 0;
    while at < 256 {
        bytes[at] = at as u8;
        at += 1;
    }
    bytes
};

impl TextCodec for ByteCodec {
    fn encode(&self, text: &str, _special: SpecialTokens) -> Result<Vec<TokenId>, TextError> {
        Ok(text.bytes().map(TokenId::from).collect())
    }

    fn token_bytes(&self, id: TokenId) -> Option<&[u8]> {
        let at = id as usize;
        if id == ByteCodec::EOS { Some(b"<|eos|>") } else { BYTES.get(at..=at) }
    }

    fn is_special(&self, id: TokenId) -> bool {
        id == ByteCodec::EOS
    }

    fn vocab_size(&self) -> u32 {
        257
    }

    fn bos(&self) -> Option<TokenId> {
        None
    }

    fn strips_leading_space(&self) -> bool {
        false
    }
}

/// A token with log-probabilities of itself alone.
pub fn report(id: TokenId, model: u8, logprob: f32) -> TokenReport {
    let logprobs = Some(TokenLogprobs { chosen: logprob, top: vec![(id, logprob)] });
    TokenReport { id, model: ModelIdx(model), entropy: None, dropped: None, logprobs }
}

/// Text and its byte tokens, all by model 0.
pub fn delta(text: &str) -> Event {
    delta_by(text, 0)
}

/// Text and its byte tokens by one model.
pub fn delta_by(text: &str, model: u8) -> Event {
    Event::Delta { text: text.to_owned(), tokens: text.bytes().map(|id| report(id.into(), model, -0.25)).collect() }
}

/// An ending with a usage that says three prompt tokens and one token by each of two models.
pub fn finished(reason: &str) -> Event {
    let reason = match reason {
        "length" => FinishReason::Length,
        "stop" => FinishReason::EndOfText,
        text => FinishReason::StopString(text.to_owned()),
    };
    let usage = Usage { prompt_tokens: 3, cached_tokens: 1, completion_tokens: 2, by_model: vec![1, 1], hops: 1 };
    Event::Finished { reason, usage, queued: Duration::from_millis(1) }
}

/// What a scripted engine does with one job.
pub type Script = Result<Vec<Event>, Refusal>;

/// Plays one script a job, in the order of arrival, and remembers the jobs. A script without an ending stays open until
/// the client goes.
#[derive(Default)]
pub struct ScriptedEngine {
    scripts: Mutex<VecDeque<Script>>,
    jobs: Mutex<Vec<Job>>,
    open: Mutex<Vec<mpsc::Sender<Event>>>,
    models: Mutex<Vec<ModelSnapshot>>,
    now: Mutex<Time>,
}

impl ScriptedEngine {
    /// An engine with these scripts.
    pub fn new(scripts: impl IntoIterator<Item = Script>) -> Arc<Self> {
        Arc::new(ScriptedEngine { scripts: Mutex::new(scripts.into_iter().collect()), ..ScriptedEngine::default() })
    }

    /// What the engine says of itself from now on.
    pub fn say(&self, now: Time, models: Vec<ModelSnapshot>) {
        *self.now.lock().unwrap() = now;
        *self.models.lock().unwrap() = models;
    }

    /// The jobs that arrived.
    pub fn jobs(&self) -> Vec<Job> {
        self.jobs.lock().unwrap().clone()
    }

    /// Jobs whose script is still open and whose client has gone.
    pub fn aborted(&self) -> usize {
        self.open.lock().unwrap().iter().filter(|events| events.is_closed()).count()
    }
}

impl Engine for ScriptedEngine {
    fn submit(&self, job: Job) -> LocalBoxFuture<'_, Result<Reply, Refusal>> {
        async move {
            self.jobs.lock().unwrap().push(job);
            let script = self.scripts.lock().unwrap().pop_front().unwrap_or_else(|| Ok(Vec::new()))?;
            let (sender, events) = mpsc::channel(script.len().max(1));
            let ends = matches!(script.last(), Some(Event::Finished { .. } | Event::Failed(_)));
            for event in script {
                sender.send(event).await.unwrap();
            }
            if !ends {
                self.open.lock().unwrap().push(sender);
            }
            Ok(Reply { id: RequestId(0), prompt_tokens: 3, events })
        }
        .boxed_local()
    }

    fn snapshot(&self) -> RuntimeSnapshot {
        let live = self.open.lock().unwrap().len() as u32;
        RuntimeSnapshot {
            now: *self.now.lock().unwrap(),
            live,
            open: true,
            models: self.models.lock().unwrap().clone(),
            ..RuntimeSnapshot::default()
        }
    }
}

/// Joins the contents; refuses a conversation that does not end with the user.
pub struct JoinTemplate;

impl ChatTemplate for JoinTemplate {
    fn prompt(&self, conversation: &Conversation) -> Result<Prompt, String> {
        let messages = &conversation.messages;
        match messages.last() {
            Some(last) if last.role.name() == "user" => {
                let text: Vec<&str> = messages.iter().map(|message| message.content.as_str()).collect();
                Ok(Prompt::Text { text: text.join("|"), special: SpecialTokens::Parse, add_bos: false })
            }
            _ => Err("the last message must be the user's".to_owned()),
        }
    }
}

/// R-Stitch between two models.
pub fn router() -> Router {
    let algorithm = routing::build("r_stitch", &serde_json::json!({}), 2).unwrap();
    Router { active: "r_stitch".to_owned(), algorithm, entries: routing::list().collect() }
}

/// A server over this engine: routed name "pair" over the models "small" and "large"; "large" has no chat template.
pub fn app(engine: Arc<ScriptedEngine>) -> App {
    let served = |id: &str, target, chat: bool| Served {
        id: id.to_owned(),
        target,
        context_len: 64,
        defaults: Default::default(),
        chat: chat.then(|| Arc::new(JoinTemplate) as Arc<dyn ChatTemplate>),
    };
    App::new(Parts {
        engine,
        codec: Arc::new(ByteCodec),
        served: vec![
            served("pair", Target::Routed, true),
            served("small", Target::Only(ModelIdx(0)), true),
            served("large", Target::Only(ModelIdx(1)), false),
        ],
        model_names: vec!["small".to_owned(), "large".to_owned()],
        router: router(),
        limits: Limits { body_bytes: 10_000, silence_max: std::time::Duration::from_millis(20), ..Limits::default() },
    })
    .unwrap()
}
