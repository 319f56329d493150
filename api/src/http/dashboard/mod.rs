//! What people look at: the page at `/dashboard` and the data it shows. Owner: the HTTP layer. Invariant: nothing here asks
//! an actor; everything comes from what actors have said, and a slow reader costs the server nothing.

mod assets;
mod describe;
mod events;
mod forecast;
pub mod state;
mod timeline;

use super::only;
use actix_web::web;
pub use assets::is_page;
pub use events::actors;
use std::sync::Mutex;
use tokenrouter_core::ids::Time;

/// What is kept between two looks.
#[derive(Debug, Default)]
pub struct Dashboard {
    shared: Mutex<events::Shared>,
    forecast: forecast::Forecast,
}

/// The routes that are for people, beside those of [`super::operations`].
pub fn configure(config: &mut web::ServiceConfig) {
    let events = web::resource("/dashboard/events").route(web::get().to(events::events));
    config.service(events.default_service(only("GET")));
    assets::configure(config);
}

/// Milliseconds since the server started.
fn ms(time: Time) -> f64 {
    time.0 as f64 / 1e6
}
