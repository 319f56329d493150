//! Prompts on their way to token ids. Owner: the HTTP layer. Invariant: a prompt is tokenised once, whatever the number of
//! its choices, and never on a thread that generates; a long one not on a thread that serves connections either.

use super::ChatTemplate;
use super::errors::ApiError;
use super::types::chat::Conversation;
use actix_web::web;
use std::sync::Arc;
use tokenrouter_core::constraint::ConstraintSpec;
use tokenrouter_core::job::Prompt;
use tokenrouter_core::text::{TextCodec, TextError};
use tokio::sync::Semaphore;

/// Texts up to this many bytes are tokenised at once: the way to another thread and back takes longer.
const INLINE_BYTES: usize = 4 << 10;

/// How much shorter than itself a text may become before it is cut into tokens: Unicode normalisation makes one byte of
/// three (full-width letters), not more.
const SHRINK_MAX: usize = 4;

/// Turns prompts into token ids.
pub struct Tokenising {
    codec: Arc<dyn TextCodec>,
    /// Bytes of the longest token, at least 1.
    token_bytes_max: usize,
    /// Long texts at once; the others wait for their turn.
    turns: Arc<Semaphore>,
}

impl Tokenising {
    /// For a vocabulary; long texts take as many threads as there are cores.
    pub fn new(codec: Arc<dyn TextCodec>) -> Self {
        let lengths = (0..codec.vocab_size()).filter_map(|id| codec.token_bytes(id)).map(<[u8]>::len);
        let token_bytes_max = lengths.max().unwrap_or(1).max(1);
        let cores = std::thread::available_parallelism().map_or(1, |cores| cores.get());
        Tokenising { codec, token_bytes_max, turns: Arc::new(Semaphore::new(cores)) }
    }

    /// The same prompts as token ids.
    ///
    /// # Errors
    /// 400 when the vocabulary refuses a text, or when it cannot fit a context of `context_len` tokens even if every token
    /// were the longest there is: such a text is not tokenised at all.
    pub async fn prompts(&self, prompts: Vec<Prompt>, context_len: u32) -> Result<Vec<Prompt>, ApiError> {
        let bytes: Vec<usize> = prompts.iter().map(text_bytes).collect();
        let least = bytes.iter().max().unwrap_or(&0) / (self.token_bytes_max * SHRINK_MAX);
        if least > context_len as usize {
            return Err(ApiError::too_long(least, context_len));
        }
        let codec = Arc::clone(&self.codec);
        let work = move || prompts.into_iter().map(|prompt| ids(&*codec, prompt)).collect::<Result<Vec<_>, _>>();
        let outcome = self.run(bytes.iter().sum(), work).await?;
        outcome.map_err(|error| ApiError::field("prompt", error.to_string()))
    }

    /// A conversation as token ids.
    ///
    /// # Errors
    /// 400 with what the template or the vocabulary says against it.
    pub async fn chat(&self, template: &Arc<dyn ChatTemplate>, conversation: Conversation) -> Result<Prompt, ApiError> {
        let bytes = conversation.bytes();
        let (template, codec) = (Arc::clone(template), Arc::clone(&self.codec));
        let work = move || {
            let prompt = template.prompt(&conversation)?;
            ids(&*codec, prompt).map_err(|error| error.to_string())
        };
        self.run(bytes, work).await?.map_err(|message| ApiError::field("messages", message))
    }

    /// Compiles what an answer must be, on another thread: from here on it is found compiled.
    ///
    /// # Errors
    /// 400 naming `field`, with what is wrong with the form.
    pub async fn form(&self, form: &ConstraintSpec, field: &str) -> Result<(), ApiError> {
        let (form, codec) = (form.clone(), Arc::clone(&self.codec));
        // Which tokens end the answer is no matter of the form.
        let work = move || codec.constraint(&form, &[0]).map(drop);
        self.aside(work).await?.map_err(|error| ApiError::field(field, error.0))
    }

    /// Does the work here, or aside if it takes long.
    async fn run<T: Send + 'static>(
        &self,
        bytes: usize,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, ApiError> {
        if bytes <= INLINE_BYTES {
            return Ok(work());
        }
        self.aside(work).await
    }

    /// Does the work on another thread. It holds its turn to its end even if the client goes.
    async fn aside<T: Send + 'static>(&self, work: impl FnOnce() -> T + Send + 'static) -> Result<T, ApiError> {
        let failed = || ApiError::internal("the request could not be prepared");
        let turn = Arc::clone(&self.turns).acquire_owned().await.map_err(|_| failed())?;
        let work = move || {
            let _turn = turn;
            work()
        };
        web::block(work).await.map_err(|_| failed())
    }
}

fn text_bytes(prompt: &Prompt) -> usize {
    match prompt {
        Prompt::Text { text, .. } => text.len(),
        Prompt::Ids(_) => 0,
    }
}

fn ids(codec: &dyn TextCodec, prompt: Prompt) -> Result<Prompt, TextError> {
    match prompt {
        Prompt::Text { text, special, add_bos: true } => codec.encode_prompt(&text, special).map(Prompt::Ids),
        Prompt::Text { text, special, add_bos: false } => codec.encode(&text, special).map(Prompt::Ids),
        ids => Ok(ids),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Mutex;
    use std::thread::{ThreadId, current};
    use tokenrouter_core::ids::TokenId;
    use tokenrouter_core::text::SpecialTokens;

    /// Pairs of bytes; remembers which threads tokenised.
    #[derive(Default)]
    struct Pairs(Mutex<Vec<ThreadId>>);

    impl TextCodec for Pairs {
        fn encode(&self, text: &str, _special: SpecialTokens) -> Result<Vec<TokenId>, TextError> {
            self.0.lock().unwrap().push(current().id());
            Ok(vec![1; text.len().div_ceil(2)])
        }

        fn token_bytes(&self, id: TokenId) -> Option<&[u8]> {
            (id < 2).then_some(b"xx")
        }

        fn is_special(&self, _id: TokenId) -> bool {
            false
        }

        fn vocab_size(&self) -> u32 {
            2
        }

        fn bos(&self) -> Option<TokenId> {
            Some(0)
        }

        fn strips_leading_space(&self) -> bool {
            false
        }
    }

    fn text(bytes: usize) -> Prompt {
        Prompt::Text { text: "x".repeat(bytes), special: SpecialTokens::Parse, add_bos: true }
    }

    #[actix_web::test]
    async fn long_texts_are_tokenised_on_another_thread_and_hopeless_ones_not_at_all() {
        let codec = Arc::new(Pairs::default());
        let tokenising = Tokenising::new(codec.clone());
        assert_eq!(tokenising.prompts(vec![text(3)], 100_000).await, Ok(vec![Prompt::Ids(vec![0, 1, 1])]));
        let both = tokenising.prompts(vec![text(INLINE_BYTES), text(2)], 100_000).await.unwrap();
        assert_eq!(both[1], Prompt::Ids(vec![0, 1]));
        let here = current().id();
        let threads = codec.0.lock().unwrap().clone();
        assert_eq!(threads.iter().map(|&thread| thread == here).collect::<Vec<_>>(), [true, false, false]);
        let edge = 8 * 50;
        tokenising.prompts(vec![text(edge), text(edge)], 50).await.unwrap();
        let refused = tokenising.prompts(vec![text(1), text(edge + 8)], 50).await.unwrap_err().body();
        assert_eq!(refused["error"]["code"], "context_length_exceeded");
        assert_eq!((&refused["error"]["n_prompt_tokens"], &refused["error"]["n_ctx"]), (&51.into(), &50.into()));
        assert_eq!(codec.0.lock().unwrap().len(), 5, "the refused list was not tokenised");
    }
}
