//! `GET /v1/routers`: the algorithms this program knows and the one that routes. Owner: the HTTP layer. Invariant: all of
//! it comes from the list of algorithms itself, so it cannot disagree with what a launch file may say.

use super::App;
use actix_web::{HttpResponse, web};
use schemars::JsonSchema;
use serde::Serialize;
use serde_json::{Value, json};
use std::sync::Arc;
use tokenrouter_core::executor::Needs;
use tokenrouter_core::ids::ModelIdx;
use tokenrouter_core::routing::{Algorithm, Entry, Kind, Param};

/// How requests are routed, and how they could be.
#[derive(Clone)]
pub struct Router {
    /// Name of the algorithm in use.
    pub active: String,
    /// The algorithm in use, with its parameters.
    pub algorithm: Arc<dyn Algorithm>,
    /// All algorithms of the program.
    pub entries: Vec<&'static Entry>,
}

/// A routing algorithm.
#[derive(Serialize, JsonSchema)]
struct RouterCard {
    /// Its name in a launch file.
    name: &'static str,
    /// What it does.
    summary: &'static str,
    /// Where it comes from.
    source: &'static str,
    /// Its parameters.
    #[schemars(with = "Vec<Value>")]
    params: &'static [Param],
    /// How many models it routes between.
    models: Range,
    /// What it reads of each model's step; null where it cannot be built without a file.
    #[schemars(with = "Option<Vec<Value>>")]
    needs: Option<Vec<Needs>>,
    /// Whether it is the one in use.
    active: bool,
}

/// Smallest and largest number of models.
#[derive(Serialize, JsonSchema)]
struct Range {
    /// Smallest.
    least: usize,
    /// Largest.
    most: usize,
}

/// All routing algorithms of the program.
#[derive(Serialize, JsonSchema)]
pub struct RouterList {
    /// Always `list`.
    object: &'static str,
    /// The algorithms.
    data: Vec<RouterCard>,
}

impl Router {
    /// One algorithm; `models` is the number of models served. `needs` has an entry per model: of the algorithm in use,
    /// or of one with default parameters; null where it cannot be built without a file.
    fn card(&self, entry: &'static Entry, models: usize) -> RouterCard {
        let (least, most) = entry.models;
        let active = entry.name == self.active;
        let count = if (least..=most).contains(&models) { models } else { least };
        let needs = |algorithm: &dyn Algorithm| -> Vec<Needs> {
            (0..count).map(|model| algorithm.needs(ModelIdx(model as u8))).collect()
        };
        let needs = if active {
            Some(needs(&*self.algorithm))
        } else {
            let built = (entry.build)(&json!({}), count).or_else(|_| (entry.build)(&stand_ins(entry), count));
            built.ok().map(|algorithm| needs(&*algorithm))
        };
        RouterCard {
            name: entry.name,
            summary: entry.summary,
            source: entry.source,
            params: entry.params,
            models: Range { least, most },
            needs,
            active,
        }
    }
}

/// A value for each parameter, so that an algorithm can be asked what it needs though some of them have no default.
fn stand_ins(entry: &Entry) -> Value {
    let value = |kind: Kind| match kind {
        Kind::Number { minimum, .. } => Some(json!(minimum)),
        Kind::Integer { minimum } => Some(json!(minimum)),
        Kind::String => Some(json!("-")),
        Kind::Array { items: "integer" } => Some(json!([0])),
        Kind::Array { .. } | Kind::Any => None,
    };
    let values = entry.params.iter().filter_map(|param| Some((param.name.to_owned(), value(param.kind)?)));
    Value::Object(values.collect())
}

/// All algorithms.
pub async fn list(app: web::Data<App>) -> HttpResponse {
    let router = &app.router;
    let data = router.entries.iter().map(|entry| router.card(entry, app.model_names.len())).collect();
    HttpResponse::Ok().json(RouterList { object: "list", data })
}
