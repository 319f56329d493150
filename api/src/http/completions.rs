//! `POST /v1/completions`. Owner: the HTTP layer. Invariant: choice `p * n + i` is the `i`-th continuation of prompt `p`.

use super::App;
use super::answer::{Answer, answer};
use super::body::read_json;
use super::choices::Outcome;
use super::dialect::{Detail, Dialect, Piece};
use super::errors::ApiError;
use super::types::completions::CompletionRequest;
use super::types::generation::JobPlace;
use super::types::logprobs::{self, LegacyLogprobs, TextPosition};
use super::types::response::{Ending, TextChoice};
use actix_web::{HttpRequest, HttpResponse, web};
use tokenrouter_core::job::{Job, Prompt, TokenReport};
use tokenrouter_core::text::{TextCodec, Utf8Stream};

/// Continues one or several prompts.
///
/// # Errors
/// 400 for a bad request, 404 for an unknown model, and what the engine refuses or fails with.
pub async fn create(
    request: HttpRequest,
    payload: web::Payload,
    app: web::Data<App>,
) -> Result<HttpResponse, ApiError> {
    let body = read_json(&request, payload, app.limits.body_bytes).await?;
    let text = CompletionRequest::read(body, app.codec.vocab_size())?;
    let served = app.served(&text.generation.model)?;
    let place = JobPlace { target: served.target, defaults: served.defaults, logprobs: text.logprobs };
    let n = text.generation.n;
    let echoes = text.prompts.iter().map(|prompt| if text.echo { shown(&*app.codec, prompt) } else { String::new() });
    let echoes: Vec<String> = echoes.flat_map(|echo| std::iter::repeat_n(echo, n as usize)).collect();
    let of_prompt = |prompt: Prompt| -> Vec<Job> {
        (0..n).map(|choice| text.generation.job(place, prompt.clone(), choice)).collect()
    };
    let jobs = text.prompts.iter().cloned().flat_map(of_prompt).collect();
    let detail = app.detail(text.logprobs.is_some(), text.generation.token_models);
    let plan =
        Answer { dialect: Text::new(detail, echoes), jobs, per_prompt: n as usize, generation: &text.generation };
    answer(&app, plan).await
}

/// A prompt as text: what `echo` puts in front.
fn shown(codec: &dyn TextCodec, prompt: &Prompt) -> String {
    match prompt {
        Prompt::Text { text, .. } => text.clone(),
        Prompt::Ids(ids) => {
            let mut utf8 = Utf8Stream::default();
            let bytes =
                ids.iter().filter(|&&id| !codec.is_special(id)).map(|&id| codec.token_bytes(id).unwrap_or_default());
            let mut text: String = bytes.map(|bytes| utf8.push(bytes)).collect();
            text.push_str(&utf8.finish());
            if codec.strips_leading_space() && text.starts_with(' ') { text.split_off(1) } else { text }
        }
    }
}

/// How text completions are written.
pub struct Text {
    detail: Detail,
    echoes: Vec<String>,
    positions: Vec<TextPosition>,
}

impl Text {
    /// One echo (maybe empty) for each choice.
    pub fn new(detail: Detail, echoes: Vec<String>) -> Self {
        let positions = echoes.iter().map(|echo| TextPosition::after(echo.chars().count())).collect();
        Text { detail, echoes, positions }
    }

    fn logprobs(&mut self, index: usize, tokens: &[TokenReport]) -> Option<LegacyLogprobs> {
        let position = self.positions.get_mut(index).filter(|_| self.detail.logprobs)?;
        Some(logprobs::legacy(&*self.detail.codec, tokens, position))
    }
}

impl Dialect for Text {
    type Whole = TextChoice;
    type Part = TextChoice;
    const WHOLE: &'static str = "text_completion";
    const CHUNK: &'static str = "text_completion";
    const ID_PREFIX: &'static str = "cmpl";

    fn whole(&mut self, index: usize, outcome: Outcome) -> TextChoice {
        let echo = self.echoes.get_mut(index).map(std::mem::take).unwrap_or_default();
        TextChoice {
            index,
            text: echo + outcome.text.as_str(),
            logprobs: self.logprobs(index, &outcome.tokens),
            ending: Ending::from(&outcome.reason),
            token_models: self.detail.makers(&outcome.tokens),
        }
    }

    fn opening(&mut self, index: usize) -> Option<TextChoice> {
        let text = self.echoes.get_mut(index).map(std::mem::take).filter(|echo| !echo.is_empty())?;
        Some(TextChoice { index, text, logprobs: None, ending: Ending::default(), token_models: None })
    }

    fn part(&mut self, piece: Piece) -> TextChoice {
        let Piece { index, text, tokens, ending } = piece;
        TextChoice {
            index,
            text,
            logprobs: if tokens.is_empty() { None } else { self.logprobs(index, &tokens) },
            ending,
            token_models: self.detail.makers(&tokens).filter(|_| !tokens.is_empty()),
        }
    }

    fn carries_tokens(&self) -> bool {
        self.detail.carries_tokens()
    }
}
