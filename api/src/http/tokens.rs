//! `POST /tokenize`, `POST /detokenize` and `GET /tokenizer_info`. Owner: the HTTP layer. Invariant: tokens are exactly those a request with the
//! same text or conversation would run with.

use super::body::read_json;
use super::errors::ApiError;
use super::types::logprobs::token_name;
use super::types::tokens::{DetokenizeRequest, Detokenized, Source, TokenizeRequest, Tokenized, TokenizerInfo};
use super::{App, Served};
use actix_web::{HttpRequest, HttpResponse, web};
use tokenrouter_core::ids::TokenId;
use tokenrouter_core::job::Prompt;
use tokenrouter_core::text::{SpecialTokens, TextCodec, Utf8Stream};

/// The tokens of a text or a conversation.
///
/// # Errors
/// 400 for a bad request, a text this vocabulary has no tokens for or a conversation the template refuses; 404 for an
/// unknown model.
pub async fn tokenize(
    request: HttpRequest,
    payload: web::Payload,
    app: web::Data<App>,
) -> Result<HttpResponse, ApiError> {
    let body = read_json(&request, payload, app.limits.body_bytes).await?;
    let asked = TokenizeRequest::read(body)?;
    let served = named(&app, asked.model.as_deref())?;
    let tokens = match asked.source {
        Source::Text { text, add_special } => {
            let prompt = Prompt::Text { text, special: SpecialTokens::Parse, add_bos: add_special };
            app.tokenising.prompts(vec![prompt], u32::MAX).await?.pop()
        }
        Source::Chat(conversation) => match &served.chat {
            Some(template) => Some(app.tokenising.chat(template, conversation).await?),
            None => {
                let message = format!("model {:?} has no chat template; send prompt", served.id);
                return Err(ApiError::field("model", message));
            }
        },
    };
    let Some(Prompt::Ids(tokens)) = tokens else { return Err(ApiError::internal("the prompt was not tokenised")) };
    let names = || tokens.iter().map(|&id| token_name(&*app.codec, id)).collect();
    let token_strs = asked.with_names.then(names);
    let max_model_len = served.context_len;
    Ok(HttpResponse::Ok().json(Tokenized { count: tokens.len(), max_model_len, tokens, token_strs }))
}

/// The text of some tokens.
///
/// # Errors
/// 400 for a bad request, 404 for an unknown model.
pub async fn detokenize(
    request: HttpRequest,
    payload: web::Payload,
    app: web::Data<App>,
) -> Result<HttpResponse, ApiError> {
    let body = read_json(&request, payload, app.limits.body_bytes).await?;
    let asked = DetokenizeRequest::read(body, app.codec.vocab_size())?;
    named(&app, asked.model.as_deref())?;
    Ok(HttpResponse::Ok().json(Detokenized { prompt: spelt(&*app.codec, &asked.tokens) }))
}

/// What the tokenizer and the chat template of the routed name are.
///
/// # Errors
/// 404 when nothing is served.
pub async fn info(app: web::Data<App>) -> Result<HttpResponse, ApiError> {
    let served = named(&app, None)?;
    let facts = served.chat.as_ref().map(|template| template.facts()).unwrap_or_default();
    let start = app.codec.bos().map(|id| token_name(&*app.codec, id));
    Ok(HttpResponse::Ok().json(TokenizerInfo {
        bos_token: start.or(facts.bos),
        eos_token: facts.eos,
        chat_template: facts.source,
        vocab_size: app.codec.vocab_size(),
        model_max_length: served.context_len,
    }))
}

/// The served model of this name, the routed one when there is none.
fn named<'a>(app: &'a App, name: Option<&str>) -> Result<&'a Served, ApiError> {
    match (name, app.served.first()) {
        (None, Some(routed)) => Ok(routed),
        (name, _) => app.served(name.unwrap_or_default()),
    }
}

/// The text of tokens, control tokens by their names: what `/tokenize` makes these tokens of again.
fn spelt(codec: &dyn TextCodec, ids: &[TokenId]) -> String {
    let mut utf8 = Utf8Stream::default();
    let mut text = String::new();
    let mut strips = codec.strips_leading_space();
    for &id in ids {
        let piece = utf8.push(codec.token_bytes(id).unwrap_or_default());
        let word = !piece.is_empty() && !codec.is_special(id);
        // The space that encoding puts before the first word.
        text.push_str(piece.strip_prefix(' ').filter(|_| strips && word).unwrap_or(&piece));
        strips &= !word;
    }
    text + utf8.finish().as_str()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::http::testing::{ScriptedEngine, app};
    use actix_web::test::{TestRequest, call_service, init_service, read_body_json};
    use serde_json::{Value, json};

    async fn post(path: &str, body: Value) -> (u16, Value) {
        let app = actix_web::App::new().app_data(web::Data::new(app(ScriptedEngine::new([]))));
        let service = init_service(app.configure(crate::http::routes)).await;
        let response = call_service(&service, TestRequest::post().uri(path).set_json(body).to_request()).await;
        (response.status().as_u16(), read_body_json(response).await)
    }

    #[actix_web::test]
    async fn texts_and_conversations_become_the_tokens_of_a_request() {
        let (status, answer) = post("/tokenize", json!({"prompt": "hi"})).await;
        let expected = json!({"count": 2, "max_model_len": 64, "tokens": [104, 105], "token_strs": null});
        assert_eq!((status, answer), (200, expected));
        let named = json!({"model": "large", "prompt": "é", "return_token_strs": true});
        let (_, answer) = post("/tokenize", named).await;
        assert_eq!(answer["token_strs"], json!(["bytes:\\xc3", "bytes:\\xa9"]));
        let turns = json!([{"role": "system", "content": "a"}, {"role": "user", "content": "b"}]);
        let (_, answer) = post("/tokenize", json!({"messages": turns})).await;
        assert_eq!(answer["tokens"], json!(b"a|b"));
        for (status, param, body) in [
            (404, "model", json!({"prompt": "hi", "model": "gpt-9"})),
            (400, "model", json!({"messages": turns, "model": "large"})),
            (400, "messages", json!({"messages": [{"role": "assistant", "content": "b"}]})),
            (400, "prompt", json!({"prompt": 1})),
        ] {
            let (found, answer) = post("/tokenize", body).await;
            assert_eq!((found, &answer["error"]["param"]), (status, &json!(param)), "{answer}");
        }
    }

    #[actix_web::test]
    async fn tokens_become_their_text_with_control_tokens_by_name() {
        for (tokens, text) in
            [(json!([104, 0xC3, 0xA9, 256]), "hé<|eos|>"), (json!([]), ""), (json!([104, 0xC3]), "h\u{FFFD}")]
        {
            assert_eq!(post("/detokenize", json!({"tokens": tokens})).await, (200, json!({"prompt": text})));
        }
        let request = TestRequest::get().uri("/tokenizer_info").to_request();
        let app = actix_web::App::new().app_data(web::Data::new(app(ScriptedEngine::new([]))));
        let service = init_service(app.configure(crate::http::routes)).await;
        let info: Value = read_body_json(call_service(&service, request).await).await;
        assert_eq!((&info["vocab_size"], &info["model_max_length"]), (&json!(257), &json!(64)));
        assert_eq!((&info["bos_token"], &info["eos_token"]), (&Value::Null, &Value::Null));
        let (status, answer) = post("/detokenize", json!({"tokens": [257]})).await;
        assert_eq!((status, &answer["error"]["param"]), (400, &json!("tokens")));
        assert_eq!(post("/detokenize", json!({"tokens": [1], "model": "gpt-9"})).await.0, 404);
    }
}
