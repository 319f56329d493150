//! Models of a hub: `hf:owner/name[@revision][:file.gguf]` to files in the local cache.
//! Owner: the launcher. Invariant: weights come last, so a cache that holds them holds all that belongs to them; what
//! is in the cache is used without asking the network.

use crate::progress::Progress;
use hf_hub::api::sync::{Api, ApiBuilder, ApiError, ApiRepo};
use hf_hub::{Cache, CacheRepo, Repo, RepoType};
use indicatif::ProgressBar;
use std::path::{Path, PathBuf};
use tokenrouter_config::HubSource;

const WEIGHTS: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";
const REQUIRED: [&str; 2] = ["config.json", "tokenizer.json"];
/// Fetched when the repository has them.
const OPTIONAL: [&str; 3] = ["tokenizer_config.json", "generation_config.json", "chat_template.jinja"];
/// Shards of one model at most; the index is the hub's word.
const SHARDS_MAX: usize = 1024;

/// A model could not be fetched.
#[derive(Debug, thiserror::Error)]
pub enum HubError {
    /// The hub does not have the repository, revision or file, or not for everybody.
    #[error(
        "{source_name}: {endpoint} does not have {what} ({reason}); check the name, or set HF_TOKEN if it is gated"
    )]
    Missing {
        /// As in the launch file.
        source_name: String,
        /// The hub asked.
        endpoint: String,
        /// `the repository` or a file.
        what: String,
        /// What the hub said.
        reason: String,
    },
    /// The hub was not reached or broke off.
    #[error(
        "{source_name}: cannot download {what} from {endpoint}: {reason}; check the network and HF_ENDPOINT, or download it and give the folder as path"
    )]
    Transfer {
        /// As in the launch file.
        source_name: String,
        /// The hub asked.
        endpoint: String,
        /// `the list of files` or a file.
        what: String,
        /// What went wrong.
        reason: String,
    },
    /// The repository is not a model that can be served.
    #[error("{source_name}: {reason}")]
    Unusable {
        /// As in the launch file.
        source_name: String,
        /// What is wrong and what would be right.
        reason: String,
    },
}

/// Which hub, and where its files are kept.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HubSettings {
    /// Address of the hub.
    pub endpoint: String,
    /// Folder of the cache (the `hub` folder inside HF_HOME).
    pub cache: PathBuf,
    /// Access token for gated models.
    pub token: Option<String>,
}

/// A hub and its cache.
pub struct Hub {
    settings: HubSettings,
    api: Api,
}

impl Hub {
    /// Prepares the client; nothing is sent yet.
    ///
    /// # Errors
    /// When the client cannot be built.
    pub fn new(settings: HubSettings) -> Result<Hub, HubError> {
        let builder = ApiBuilder::from_cache(Cache::new(settings.cache.clone()))
            .with_endpoint(settings.endpoint.clone())
            .with_token(settings.token.clone())
            .with_retries(3)
            .with_progress(false);
        let api = builder.build().map_err(|error| HubError::Unusable {
            source_name: settings.endpoint.clone(),
            reason: format!("the hub client cannot be built: {error}"),
        })?;
        Ok(Hub { settings, api })
    }

    /// The files if the cache has them all: a folder, or the GGUF file. Asks nobody.
    pub fn cached(&self, source: &HubSource) -> Option<PathBuf> {
        let cache = Cache::new(self.settings.cache.clone()).repo(repo(source));
        if let Some(file) = &source.file {
            return cache.get(file);
        }
        let folder = cache.get(REQUIRED[0])?.parent()?.to_owned();
        let complete = REQUIRED.iter().all(|name| cache.get(name).is_some()) && weights_cached(&cache);
        complete.then_some(folder)
    }

    /// The files, downloaded if need be, with a bar per file: a folder, or the GGUF file.
    ///
    /// # Errors
    /// [`HubError`] naming the repository, the file and the remedy.
    pub fn fetch(&self, source: &HubSource, progress: &Progress) -> Result<PathBuf, HubError> {
        if let Some(path) = self.cached(source) {
            return Ok(path);
        }
        let download = Download { hub: self, source, repo: self.api.repo(repo(source)), progress };
        download.run()
    }
}

fn repo(source: &HubSource) -> Repo {
    Repo::with_revision(source.repo.clone(), RepoType::Model, source.revision.clone())
}

fn weights_cached(cache: &CacheRepo) -> bool {
    match cache.get(INDEX) {
        Some(index) => shards(&index).is_ok_and(|shards| shards.iter().all(|shard| cache.get(shard).is_some())),
        None => cache.get(WEIGHTS).is_some(),
    }
}

/// File names of the shards an index lists.
fn shards(index: &Path) -> Result<Vec<String>, String> {
    let text = std::fs::read_to_string(index).map_err(|error| format!("{INDEX}: {error}"))?;
    let index: serde_json::Value = serde_json::from_str(&text).map_err(|error| format!("{INDEX}: {error}"))?;
    let map = index["weight_map"].as_object().ok_or(format!("{INDEX} has no weight_map"))?;
    let mut names = Vec::new();
    for name in map.values() {
        let name = name.as_str().ok_or(format!("{INDEX}: a shard name is not a string"))?;
        if name.contains(['/', '\\']) || !name.ends_with(".safetensors") {
            return Err(format!("{INDEX} names `{name}`, which is not a safetensors file beside it"));
        }
        names.push(name.to_owned());
    }
    names.sort_unstable();
    names.dedup();
    match names.len() {
        0 => Err(format!("{INDEX} lists no shard")),
        count if count > SHARDS_MAX => Err(format!("{INDEX} lists {count} shards; at most {SHARDS_MAX} are read")),
        _ => Ok(names),
    }
}

/// One model being fetched.
struct Download<'a> {
    hub: &'a Hub,
    source: &'a HubSource,
    repo: ApiRepo,
    progress: &'a Progress,
}

impl Download<'_> {
    fn run(&self) -> Result<PathBuf, HubError> {
        if let Some(file) = &self.source.file {
            return self.get(file);
        }
        let listed = self.repo.info().map_err(|error| self.failed("the repository", &error))?;
        let listed: Vec<String> = listed.siblings.into_iter().map(|file| file.rfilename).collect();
        let has = |name: &str| listed.iter().any(|file| file == name);
        if !has(WEIGHTS) && !has(INDEX) {
            return Err(self.unusable(without_safetensors(&self.source.repo, &listed)));
        }
        for name in OPTIONAL.iter().filter(|name| has(name)) {
            self.get(name)?;
        }
        let mut folder = PathBuf::new();
        for name in REQUIRED {
            let path = self.get(name)?;
            folder = path.parent().map(Path::to_owned).unwrap_or_default();
        }
        if has(INDEX) {
            let index = self.get(INDEX)?;
            for shard in shards(&index).map_err(|reason| self.unusable(reason))? {
                self.get(&shard)?;
            }
        } else {
            self.get(WEIGHTS)?;
        }
        Ok(folder)
    }

    /// One file, from the cache if it is there.
    fn get(&self, name: &str) -> Result<PathBuf, HubError> {
        if let Some(path) = Cache::new(self.hub.settings.cache.clone()).repo(repo(self.source)).get(name) {
            return Ok(path);
        }
        tracing::info!(repo = %self.source.repo, file = name, "downloading");
        let bar = Bar(self.progress.bytes(name, 0));
        self.repo.download_with_progress(name, bar).map_err(|error| self.failed(name, &error))
    }

    fn failed(&self, what: &str, error: &ApiError) -> HubError {
        let (source_name, endpoint) = (self.source.to_string(), self.hub.settings.endpoint.clone());
        let (what, reason) = (what.to_owned(), error.to_string());
        // The client's error type for a status is not re-exported; its text is part of that client's pinned version.
        if ["status: 401", "status: 403", "status: 404"].iter().any(|status| reason.contains(status)) {
            HubError::Missing { source_name, endpoint, what, reason }
        } else {
            HubError::Transfer { source_name, endpoint, what, reason }
        }
    }

    fn unusable(&self, reason: String) -> HubError {
        HubError::Unusable { source_name: self.source.to_string(), reason }
    }
}

/// What to say of a repository without safetensors.
fn without_safetensors(repo: &str, listed: &[String]) -> String {
    let gguf: Vec<&str> =
        listed.iter().map(String::as_str).filter(|name| name.to_lowercase().ends_with(".gguf")).collect();
    match gguf.first() {
        Some(first) => format!(
            "the repository has no {WEIGHTS} but {} GGUF files; name one of them, for example hf:{repo}:{first}",
            gguf.len()
        ),
        None => format!("the repository has neither {WEIGHTS} nor a GGUF file; name a repository that holds a model"),
    }
}

/// A progress bar as the hub client wants it.
struct Bar(ProgressBar);

impl hf_hub::api::Progress for Bar {
    fn init(&mut self, size: usize, _filename: &str) {
        self.0.set_length(size as u64);
        self.0.set_position(0);
    }

    fn update(&mut self, size: usize) {
        self.0.inc(size as u64);
    }

    fn finish(&mut self) {
        self.0.finish_and_clear();
    }
}
