//! `GET /version`. Owner: the HTTP layer. Invariant: it is the version of the program that answers.

use actix_web::HttpResponse;
use schemars::JsonSchema;
use serde::Serialize;

/// Which program answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, JsonSchema)]
pub struct Version {
    /// Its version.
    pub version: &'static str,
}

impl Version {
    /// This program's.
    pub const THIS: Version = Version { version: env!("CARGO_PKG_VERSION") };
}

/// The version of this program.
pub async fn version() -> HttpResponse {
    HttpResponse::Ok().json(Version::THIS)
}
