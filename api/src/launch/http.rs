//! What the HTTP layer needs of the models and the runtime. Owner: the serve command. Invariant: the routed name comes
//! first, then each model by its own name.

use super::{LaunchError, Loaded};
use crate::http::types::generation::SamplingDefaults;
use crate::http::{App, ChatTemplate, Limits, Parts, Router, Served};
use crate::text::ModelText;
use std::sync::Arc;
use std::time::Duration;
use tokenrouter_actors::runtime::Runtime;
use tokenrouter_config::Server;
use tokenrouter_core::ids::ModelIdx;
use tokenrouter_core::job::Target;
use tokenrouter_gpu::weights::GenerationDefaults;

/// What a model's makers say about sampling; greedy when they say not to sample.
fn defaults(said: &GenerationDefaults) -> SamplingDefaults {
    let open = SamplingDefaults::default();
    SamplingDefaults {
        temperature: if said.do_sample == Some(false) { 0.0 } else { said.temperature.unwrap_or(open.temperature) },
        top_p: said.top_p.unwrap_or(open.top_p),
        top_k: said.top_k.unwrap_or(open.top_k),
        min_p: said.min_p.unwrap_or(open.min_p),
        repetition_penalty: said.repetition_penalty.unwrap_or(open.repetition_penalty),
    }
}

fn chat(text: &ModelText) -> Option<Arc<dyn ChatTemplate>> {
    text.template.is_some().then(|| Arc::new(text.clone()) as Arc<dyn ChatTemplate>)
}

/// The names that can be asked for: the routed one, with the sampling defaults of the entry model and the shortest
/// context of all, then each model.
pub fn served(loaded: &Loaded) -> Vec<Served> {
    let contexts = loaded.members.iter().map(|member| member.model.limits().context_len);
    let routed = Served {
        id: loaded.file.router.name.clone(),
        target: Target::Routed,
        context_len: contexts.min().unwrap_or(0),
        defaults: defaults(&loaded.members[0].generation),
        chat: chat(loaded.text()),
    };
    let models = loaded.members.iter().enumerate().map(|(index, member)| Served {
        id: member.name.clone(),
        target: Target::Only(ModelIdx(index as u8)),
        context_len: member.model.limits().context_len,
        defaults: defaults(&member.generation),
        chat: chat(&member.text),
    });
    std::iter::once(routed).chain(models).collect()
}

fn limits(server: &Server) -> Limits {
    Limits {
        body_bytes: usize::try_from(server.body_bytes_max.0).unwrap_or(usize::MAX),
        stall: Duration::from_millis(server.stall_ms),
        client: Duration::from_millis(server.client_timeout_ms),
        ..Limits::default()
    }
}

/// The HTTP application over a running runtime.
///
/// # Errors
/// [`LaunchError::Server`] when its metrics cannot be set up.
pub fn app(loaded: &Loaded, runtime: Runtime) -> Result<App, LaunchError> {
    let parts = Parts {
        engine: Arc::new(runtime),
        codec: loaded.codec(),
        served: served(loaded),
        model_names: loaded.names(),
        router: Router {
            active: loaded.file.router.algorithm.clone(),
            algorithm: loaded.algorithm.clone(),
            entries: loaded.catalog.entries().collect(),
        },
        limits: limits(&loaded.file.server),
    };
    App::new(parts).map_err(|error| LaunchError::Server(format!("the metrics cannot be set up: {error}")))
}
