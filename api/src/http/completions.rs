//! `POST /v1/completions`. Owner: the HTTP layer. Invariant: choice `p * n + i` is the `i`-th continuation of prompt `p`.

use super::answer::{Answer, answer};
use super::body::read_json;
use super::choices::Outcome;
use super::dialect::{Detail, Dialect, Piece};
use super::errors::ApiError;
use super::types::completions::CompletionRequest;
use super::types::generation::JobPlace;
use super::types::logprobs::{self, LegacyLogprobs, TextPosition};
use super::types::response::{Ending, TextChoice};
use super::types::response_format::SCHEMA;
use super::{App, trace};
use actix_web::{HttpRequest, HttpResponse, web};
use std::iter::{repeat, repeat_n};
use tokenrouter_core::job::{Job, Prompt, TokenReport};
use tokenrouter_core::text::{TextCodec, Utf8Stream};

/// Log-probabilities of prompts that one answer may carry, those of alternatives included: some tens of megabytes.
const PROMPT_LOGPROBS_MAX: usize = 1 << 20;

/// Continues one or several prompts.
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
    let text = CompletionRequest::read(body, app.codec.vocab_size())?;
    let served = app.served(&text.generation.model)?;
    let place = JobPlace { target: served.target, defaults: served.defaults, logprobs: text.logprobs };
    let n = text.generation.n;
    let echoes = text.prompts.iter().map(|prompt| if text.echo { shown(&*app.codec, prompt) } else { String::new() });
    let echoes: Vec<String> = echoes.flat_map(|echo| repeat_n(echo, n as usize)).collect();
    let prompts = app.tokenising.prompts(text.prompts, served.context_len).await?;
    if let Some(form) = &text.generation.constraint {
        app.tokenising.form(form, SCHEMA).await?;
    }
    let prompt_logprobs = text.logprobs.filter(|_| text.echo);
    if let Some(alternatives) = prompt_logprobs {
        check_amount(&prompts, (alternatives, n, served.context_len))?;
    }
    let of_prompt = |prompt: Prompt| -> Vec<Job> {
        let job = |choice| Job { prompt_logprobs, ..text.generation.job(place, prompt.clone(), choice) };
        (0..n).map(job).collect()
    };
    let jobs = prompts.into_iter().flat_map(of_prompt).collect();
    let detail = app.detail(text.logprobs.is_some(), &text.generation);
    let dialect = Text { tells_prompts: prompt_logprobs.is_some(), ..Text::new(detail, echoes) };
    let plan = Answer { dialect, jobs, per_prompt: n as usize, generation: &text.generation, trace };
    answer(&app, plan).await
}

/// Refuses an answer that would carry too many log-probabilities; prompts over the context are refused elsewhere.
fn check_amount(prompts: &[Prompt], (alternatives, n, context_len): (u8, u32, u32)) -> Result<(), ApiError> {
    let len = |prompt: &Prompt| if let Prompt::Ids(ids) = prompt { ids.len().min(context_len as usize) } else { 0 };
    let tokens: usize = prompts.iter().map(len).sum();
    let amount = tokens * n as usize * (1 + usize::from(alternatives));
    if amount <= PROMPT_LOGPROBS_MAX {
        return Ok(());
    }
    let message = format!(
        "{tokens} prompt tokens times n = {n} with {alternatives} alternatives each are {amount} log-probabilities; at most \
         {PROMPT_LOGPROBS_MAX} go into one answer: ask for fewer alternatives or send the prompts one by one"
    );
    Err(ApiError::field("logprobs", message))
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
    spaces: Vec<Space>,
    /// The echoes come with the log-probabilities of the prompts.
    tells_prompts: bool,
}

/// The one space at the head of a text that decoding drops. It belongs there when the echo of the prompt comes before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Space {
    /// The first token has not come.
    Unknown,
    /// To be put in front of the next text.
    Dropped,
    /// Nothing is missing.
    Settled,
}

impl Space {
    /// The text with its space.
    fn restore(&mut self, codec: &dyn TextCodec, text: String, tokens: &[TokenReport]) -> String {
        if *self == Space::Unknown {
            let visible = tokens.iter().filter(|token| !codec.is_special(token.id));
            let first = visible.filter_map(|token| codec.token_bytes(token.id)?.first()).next();
            *self = match first {
                Some(b' ') => Space::Dropped,
                Some(_) => Space::Settled,
                None => Space::Unknown,
            };
        }
        if *self != Space::Dropped || text.is_empty() {
            return text;
        }
        *self = Space::Settled;
        format!(" {text}")
    }
}

impl Text {
    /// One echo (maybe empty) for each choice.
    pub fn new(detail: Detail, echoes: Vec<String>) -> Self {
        let positions = echoes.iter().map(|echo| TextPosition::after(echo)).collect();
        let drops = detail.codec.strips_leading_space();
        let space = |echo: &String| if drops && !echo.is_empty() { Space::Unknown } else { Space::Settled };
        let spaces = echoes.iter().map(space).collect();
        Text { detail, echoes, positions, spaces, tells_prompts: false }
    }

    /// New text of a choice, with the space that decoding dropped if it follows an echo.
    fn spaced(&mut self, index: usize, text: String, tokens: &[TokenReport]) -> String {
        match self.spaces.get_mut(index) {
            Some(space) => space.restore(&*self.detail.codec, text, tokens),
            None => text,
        }
    }

    fn logprobs(&mut self, index: usize, tokens: &[TokenReport]) -> Option<LegacyLogprobs> {
        let position = self.positions.get_mut(index).filter(|_| self.detail.logprobs)?;
        Some(logprobs::legacy(&*self.detail.codec, tokens, position))
    }

    fn prompt_logprobs(&self, echo: &str, tokens: &[TokenReport]) -> Option<LegacyLogprobs> {
        self.tells_prompts.then(|| logprobs::legacy_prompt(&*self.detail.codec, tokens, echo))
    }
}

impl Dialect for Text {
    type Whole = TextChoice;
    type Part = TextChoice;
    const WHOLE: &'static str = "text_completion";
    const CHUNK: &'static str = "text_completion";
    const ID_PREFIX: &'static str = "cmpl";
    const OPERATION: &'static str = "text_completion";

    fn whole(&mut self, index: usize, outcome: Outcome) -> TextChoice {
        let echo = self.echoes.get_mut(index).map(std::mem::take).unwrap_or_default();
        let mut logprobs = self.prompt_logprobs(&echo, &outcome.prompt);
        match (&mut logprobs, self.logprobs(index, &outcome.tokens)) {
            (Some(logprobs), Some(more)) => logprobs.extend(more),
            (logprobs, more) => *logprobs = more,
        }
        TextChoice {
            index,
            text: echo + self.spaced(index, outcome.text, &outcome.tokens).as_str(),
            logprobs,
            ending: Ending::from(&outcome.reason),
            token_models: self.detail.makers(&outcome.tokens),
            token_details: self.detail.details(&outcome.tokens, outcome.took),
        }
    }

    /// An echo with log-probabilities comes when they do.
    fn opening(&mut self, index: usize) -> Option<TextChoice> {
        if self.tells_prompts {
            return None;
        }
        let text = self.echoes.get_mut(index).map(std::mem::take).filter(|echo| !echo.is_empty())?;
        Some(TextChoice::bare(index, text))
    }

    fn prompt(&mut self, index: usize, tokens: &[TokenReport]) -> Option<TextChoice> {
        let text = self.echoes.get_mut(index).map(std::mem::take)?;
        let logprobs = self.prompt_logprobs(&text, tokens);
        Some(TextChoice { logprobs, ..TextChoice::bare(index, text) })
    }

    fn part(&mut self, piece: Piece) -> Option<TextChoice> {
        let Piece { index, text, tokens, took, ending } = piece;
        let text = self.spaced(index, text, &tokens);
        Some(TextChoice {
            index,
            text,
            logprobs: if tokens.is_empty() { None } else { self.logprobs(index, &tokens) },
            ending,
            token_models: self.detail.makers(&tokens).filter(|_| !tokens.is_empty()),
            token_details: self.detail.details(&tokens, repeat(took)).filter(|_| !tokens.is_empty()),
        })
    }

    /// The first token of a choice says whether a space was dropped, also if it has no text yet.
    fn carries_tokens(&self) -> bool {
        self.detail.carries_tokens() || self.spaces.contains(&Space::Unknown)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::http::testing::report;
    use std::sync::Arc;
    use std::time::Duration;
    use tokenrouter_core::ids::TokenId;
    use tokenrouter_core::text::{SpecialTokens, TextError};

    /// A vocabulary that writes the space before a word into its token, as SentencePiece does; 0 is a control token.
    struct Pieces;

    const PIECES: [&[u8]; 4] = [b"<s>", b" I", b" am", b" "];

    impl TextCodec for Pieces {
        fn encode(&self, _text: &str, _special: SpecialTokens) -> Result<Vec<TokenId>, TextError> {
            Err(TextError("not needed".to_owned()))
        }

        fn token_bytes(&self, id: TokenId) -> Option<&[u8]> {
            PIECES.get(id as usize).copied()
        }

        fn is_special(&self, id: TokenId) -> bool {
            id == 0
        }

        fn vocab_size(&self) -> u32 {
            4
        }

        fn bos(&self) -> Option<TokenId> {
            Some(0)
        }

        fn strips_leading_space(&self) -> bool {
            true
        }
    }

    fn said(echo: &str, pieces: &[(&str, TokenId)]) -> String {
        let (codec, model_names) = (Arc::new(Pieces), Arc::new([]));
        let detail = Detail { codec, model_names, logprobs: false, token_models: false, token_details: false };
        let mut text = Text::new(detail, vec![echo.to_owned()]);
        let mut joined = text.opening(0).map(|choice| choice.text).unwrap_or_default();
        for &(shown, id) in pieces {
            if shown.is_empty() && !text.carries_tokens() {
                continue;
            }
            let tokens = vec![report(id, 0, -1.0)];
            let piece =
                Piece { index: 0, text: shown.to_owned(), tokens, took: Duration::ZERO, ending: Ending::default() };
            joined.push_str(&text.part(piece).unwrap().text);
        }
        joined
    }

    #[test]
    fn an_answer_carries_a_bounded_number_of_prompt_logprobs() {
        let prompts = vec![Prompt::Ids(vec![1; 1 << 12]); 4];
        assert_eq!(check_amount(&prompts, (15, 4, 1 << 20)), Ok(()));
        let refused = check_amount(&prompts, (15, 5, 1 << 20)).unwrap_err();
        assert_eq!((refused.status().as_u16(), refused.param()), (400, Some("logprobs")));
        assert_eq!(check_amount(&prompts, (15, 128, 64)), Ok(()), "such prompts are refused for their length");
    }

    #[test]
    fn the_space_between_an_echo_and_its_continuation_is_kept() {
        // What the engine shows of the tokens " am", " I", "<s> am", "  am": one space at the head is dropped.
        for (pieces, alone, echoed) in [
            (vec![("am", 2), (" I", 1)], "am I", "I am I"),
            (vec![("", 0), ("am", 2)], "am", "I am"),
            (vec![("", 3), (" am", 2)], " am", "I  am"),
            (vec![("", 2), ("am", 1)], "am", "I am"),
        ] {
            assert_eq!(said("", &pieces), alone);
            assert_eq!(said("I", &pieces), echoed);
        }
        assert_eq!(shown(&Pieces, &Prompt::Ids(vec![0, 1, 2])), "I am");
    }
}
