//! `POST /v1/chat/completions`. Owner: the HTTP layer. Invariant: the conversation reaches the models as the chat template
//! writes it, tokenised without any added token; contents can not forge control tokens.

use super::answer::{Answer, answer};
use super::body::read_json;
use super::calls::{Calls, Taken};
use super::choices::Outcome;
use super::dialect::{Detail, Dialect, Piece};
use super::errors::ApiError;
use super::types::chat::{ChatRequest, Conversation, Message};
use super::types::generation::{Generation, JobPlace};
use super::types::logprobs;
use super::types::response::{AnswerMessage, ChatChoice, ChatChunkChoice, Delta, Ending};
use super::types::response_format::{RESPONSE_FORMAT, SCHEMA, check_ends};
use super::types::tools::{Calling, Tool};
use super::{App, ChatTemplate, TemplateFacts, trace};
use crate::text::tools::ToolDialect;
use crate::text::{ChatInput, ModelText, NamedTokens};
use actix_web::{HttpRequest, HttpResponse, web};
use serde_json::Value;
use std::iter::repeat;
use std::time::{SystemTime, UNIX_EPOCH};
use tokenrouter_core::constraint::ConstraintSpec;
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
    let trace = trace::of(&request);
    let body = read_json(&request, payload, app.limits.body_bytes).await?;
    let chat = ChatRequest::read(body, app.codec.vocab_size())?;
    let served = app.served(&chat.generation.model)?;
    let Some(template) = &served.chat else {
        let message = format!("model {:?} has no chat template; use /v1/completions", served.id);
        return Err(ApiError::field("model", message));
    };
    let calling = chat.calls.plan(&chat.conversation.tools, template.tools())?;
    let mut generation = chat.generation;
    if let Some(calling) = &calling {
        hold_to(calling, &mut generation)?;
    }
    if let Some(form) = &generation.constraint {
        let compiled = app.tokenising.form(form, if calling.is_some() { "tools" } else { SCHEMA }).await;
        if let Err(error) = compiled {
            return Err(faulty_tool(&app, &chat.conversation.tools).await.unwrap_or(error));
        }
    }
    let prompt = app.tokenising.chat(template, chat.conversation).await?;
    let place = JobPlace { target: served.target, defaults: served.defaults, logprobs: chat.logprobs };
    let detail = app.detail(chat.logprobs.is_some(), &generation);
    let n = generation.n;
    let jobs = (0..n).map(|choice| generation.job(place, prompt.clone(), choice)).collect();
    let calls = calling.map(Calls::new);
    let plan = Answer { dialect: Chat { detail, calls }, jobs, per_prompt: n as usize, generation: &generation, trace };
    answer(&app, plan).await
}

/// Calls have a form, so the answer cannot have another.
fn hold_to(calling: &Calling, generation: &mut Generation) -> Result<(), ApiError> {
    if generation.constraint.is_some() {
        let message = "response_format does not go with tools: a call has its own form; leave one of them out";
        return Err(ApiError::field(RESPONSE_FORMAT, message));
    }
    check_ends("tools", &generation.stop)?;
    generation.constraint = Some(ConstraintSpec::Lark(calling.grammar.clone()));
    Ok(())
}

/// What is wrong with the first tool whose parameters no answer could follow.
async fn faulty_tool(app: &App, tools: &[Tool]) -> Option<ApiError> {
    for (at, tool) in tools.iter().enumerate() {
        let schema = ConstraintSpec::Json(Value::Object(tool.callable.schema.clone()).to_string());
        let field = format!("tools[{at}].function.parameters");
        if let Err(error) = app.tokenising.form(&schema, &field).await {
            return Some(error);
        }
    }
    None
}

impl ChatTemplate for ModelText {
    fn prompt(&self, conversation: &Conversation) -> Result<Prompt, String> {
        let support = self.template.as_ref().map(|template| template.tools()).unwrap_or_default();
        let messages: Vec<Value> = support.fit(conversation.messages.iter().map(Message::for_template).collect());
        let tools: Vec<Value> = conversation.tools.iter().map(|tool| tool.definition.clone()).collect();
        let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
        let input = ChatInput {
            messages: &messages,
            tools: Some(&tools),
            variables: conversation.variables.as_ref(),
            add_generation_prompt: true,
            unix_seconds: i64::try_from(now).unwrap_or(i64::MAX),
        };
        self.chat(&input).map(Prompt::Ids).map_err(|error| error.to_string())
    }

    fn tools(&self) -> ToolDialect {
        self.template.as_ref().map(|template| template.tools().dialect).unwrap_or_default()
    }

    fn facts(&self) -> TemplateFacts {
        let Some(template) = &self.template else { return TemplateFacts::default() };
        let NamedTokens { bos, eos } = template.tokens().clone();
        TemplateFacts { source: template.source(), bos, eos }
    }
}

/// How chat answers are written.
pub struct Chat {
    /// What is reported beside them.
    pub detail: Detail,
    /// Finds the calls, if tools may be called.
    pub calls: Option<Calls>,
}

impl Dialect for Chat {
    type Whole = ChatChoice;
    type Part = ChatChunkChoice;
    const WHOLE: &'static str = "chat.completion";
    const CHUNK: &'static str = "chat.completion.chunk";
    const ID_PREFIX: &'static str = "chatcmpl";
    const OPERATION: &'static str = "chat";

    fn whole(&mut self, index: usize, outcome: Outcome) -> ChatChoice {
        let ending = Ending::from(&outcome.reason);
        let taken = match &self.calls {
            Some(calls) => calls.whole(&outcome.text, ending),
            None => Taken { content: Some(outcome.text), calls: Vec::new(), ending },
        };
        ChatChoice {
            index,
            logprobs: self.detail.logprobs.then(|| logprobs::chat(&*self.detail.codec, &outcome.tokens)),
            ending: taken.ending,
            token_models: self.detail.makers(&outcome.tokens),
            token_details: self.detail.details(&outcome.tokens, outcome.took),
            message: AnswerMessage {
                role: "assistant",
                content: taken.content,
                tool_calls: taken.calls,
                refusal: None,
            },
        }
    }

    fn opening(&mut self, index: usize) -> Option<ChatChunkChoice> {
        // An answer that calls may have no text at all.
        let content = self.calls.is_none().then(String::new);
        let delta = Delta { role: Some("assistant"), content, tool_calls: Vec::new() };
        let (ending, token_models) = (Ending::default(), None);
        Some(ChatChunkChoice { index, delta, logprobs: None, ending, token_models, token_details: None })
    }

    fn part(&mut self, piece: Piece) -> Option<ChatChunkChoice> {
        let Piece { index, text, tokens, took, ending } = piece;
        let (text, tool_calls, ending) = match &mut self.calls {
            Some(calls) => {
                let added = calls.piece(index, &text, ending);
                (added.content, added.calls, added.ending)
            }
            None => (text, Vec::new(), ending),
        };
        let finish = ending.finish_reason.is_some();
        let tells_tokens = self.detail.carries_tokens() && !tokens.is_empty();
        if self.calls.is_some() && text.is_empty() && tool_calls.is_empty() && !finish && !tells_tokens {
            return None;
        }
        let needless = finish || self.calls.is_some();
        let report = self.detail.logprobs && !tokens.is_empty();
        Some(ChatChunkChoice {
            index,
            delta: Delta { role: None, content: (!needless || !text.is_empty()).then_some(text), tool_calls },
            logprobs: report.then(|| logprobs::chat(&*self.detail.codec, &tokens)),
            ending,
            token_models: self.detail.makers(&tokens).filter(|_| !tokens.is_empty()),
            token_details: self.detail.details(&tokens, repeat(took)).filter(|_| !tokens.is_empty()),
        })
    }

    fn carries_tokens(&self) -> bool {
        self.detail.carries_tokens()
    }
}
