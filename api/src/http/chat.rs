//! `POST /v1/chat/completions`. Owner: the HTTP layer. Invariant: the conversation reaches the models as the chat template
//! writes it, tokenised without any added token; contents can not forge control tokens.

use super::answer::{Answer, answer};
use super::body::read_json;
use super::choices::Outcome;
use super::dialect::{Detail, Dialect, Piece};
use super::errors::ApiError;
use super::types::chat::{ChatRequest, Conversation};
use super::types::generation::JobPlace;
use super::types::logprobs;
use super::types::response::{AnswerMessage, ChatChoice, ChatChunkChoice, Delta, Ending};
use super::{App, ChatTemplate, TemplateFacts};
use crate::text::{ChatInput, ModelText, NamedTokens};
use actix_web::{HttpRequest, HttpResponse, web};
use serde_json::{Value, json};
use std::time::{SystemTime, UNIX_EPOCH};
use tokenrouter_core::job::Prompt;

/// Answers a conversation.
///
/// # Errors
/// 400 for a bad request, 404 for an unknown model, and what the engine refuses or fails with.
pub async fn create(
    request: HttpRequest,
    payload: web::Payload,
    app: web::Data<App>,
) -> Result<HttpResponse, ApiError> {
    let body = read_json(&request, payload, app.limits.body_bytes).await?;
    let chat = ChatRequest::read(body, app.codec.vocab_size())?;
    let served = app.served(&chat.generation.model)?;
    let Some(template) = &served.chat else {
        let message = format!("model {:?} has no chat template; use /v1/completions", served.id);
        return Err(ApiError::field("model", message));
    };
    let prompt = app.tokenising.chat(template, chat.conversation).await?;
    let place = JobPlace { target: served.target, defaults: served.defaults, logprobs: chat.logprobs };
    let detail = app.detail(chat.logprobs.is_some(), chat.generation.token_models);
    let n = chat.generation.n;
    let jobs = (0..n).map(|choice| chat.generation.job(place, prompt.clone(), choice)).collect();
    let plan = Answer { dialect: Chat(detail), jobs, per_prompt: n as usize, generation: &chat.generation };
    answer(&app, plan).await
}

impl ChatTemplate for ModelText {
    fn prompt(&self, conversation: &Conversation) -> Result<Prompt, String> {
        let turn =
            |message: &super::types::chat::Message| json!({"role": message.role.name(), "content": message.content});
        let messages: Vec<Value> = conversation.messages.iter().map(turn).collect();
        let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
        let input = ChatInput {
            messages: &messages,
            tools: None,
            variables: conversation.variables.as_ref(),
            add_generation_prompt: true,
            unix_seconds: i64::try_from(now).unwrap_or(i64::MAX),
        };
        self.chat(&input).map(Prompt::Ids).map_err(|error| error.to_string())
    }

    fn facts(&self) -> TemplateFacts {
        let Some(template) = &self.template else { return TemplateFacts::default() };
        let NamedTokens { bos, eos } = template.tokens().clone();
        TemplateFacts { source: template.source(), bos, eos }
    }
}

/// How chat answers are written.
pub struct Chat(pub Detail);

impl Dialect for Chat {
    type Whole = ChatChoice;
    type Part = ChatChunkChoice;
    const WHOLE: &'static str = "chat.completion";
    const CHUNK: &'static str = "chat.completion.chunk";
    const ID_PREFIX: &'static str = "chatcmpl";

    fn whole(&mut self, index: usize, outcome: Outcome) -> ChatChoice {
        ChatChoice {
            index,
            logprobs: self.0.logprobs.then(|| logprobs::chat(&*self.0.codec, &outcome.tokens)),
            ending: Ending::from(&outcome.reason),
            token_models: self.0.makers(&outcome.tokens),
            message: AnswerMessage { role: "assistant", content: outcome.text, refusal: None },
        }
    }

    fn opening(&mut self, index: usize) -> Option<ChatChunkChoice> {
        let delta = Delta { role: Some("assistant"), content: Some(String::new()) };
        Some(ChatChunkChoice { index, delta, logprobs: None, ending: Ending::default(), token_models: None })
    }

    fn part(&mut self, piece: Piece) -> ChatChunkChoice {
        let Piece { index, text, tokens, ending } = piece;
        let finish = ending.finish_reason.is_some();
        let content = (!finish || !text.is_empty()).then_some(text);
        let report = self.0.logprobs && !tokens.is_empty();
        ChatChunkChoice {
            index,
            delta: Delta { role: None, content },
            logprobs: report.then(|| logprobs::chat(&*self.0.codec, &tokens)),
            ending,
            token_models: self.0.makers(&tokens).filter(|_| !tokens.is_empty()),
        }
    }

    fn carries_tokens(&self) -> bool {
        self.0.carries_tokens()
    }
}
