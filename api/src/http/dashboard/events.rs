//! `GET /actors` and `GET /dashboard/events`. Owner: the HTTP layer. Invariant: a document is written at most a few times a
//! second however many look at it; an event is made when its reader can take it, so a slow one keeps nothing waiting, and
//! no stream outlives the server's wish to stop.

use super::Dashboard;
use super::state::State;
use super::timeline::Timeline;
use crate::http::App;
use actix_web::http::header;
use actix_web::web::{self, Bytes};
use actix_web::{HttpResponse, web::Data};
use futures_util::stream::{Stream, unfold};
use serde::Serialize;
use std::convert::Infallible;
use std::sync::PoisonError;
use std::time::{Duration, Instant};
use tokio::time::{Interval, MissedTickBehavior, interval};

/// Between two events with the state; requests come with every second one.
const EVERY: Duration = Duration::from_millis(500);
/// A document that is not older than this is told again.
const FRESH: Duration = Duration::from_millis(200);

/// What readers share.
#[derive(Debug, Default)]
pub struct Shared {
    state: Option<(Instant, Bytes)>,
    requests: Option<(Instant, Bytes)>,
    timeline: Timeline,
}

impl Dashboard {
    /// The document of `GET /actors` as it is now or was a moment ago.
    fn state(&self, app: &App) -> Bytes {
        let mut shared = self.shared.lock().unwrap_or_else(PoisonError::into_inner);
        fresh(&mut shared.state, || {
            let snapshot = app.engine.snapshot();
            let prediction = self.forecast.look(&snapshot);
            State::new(app, &snapshot, prediction)
        })
    }

    /// The latest requests.
    fn requests(&self, app: &App) -> Bytes {
        let mut shared = self.shared.lock().unwrap_or_else(PoisonError::into_inner);
        let Shared { requests, timeline, .. } = &mut *shared;
        fresh(requests, || {
            timeline.absorb(app.engine.take_journals());
            let snapshot = app.engine.snapshot();
            let names: Vec<&str> = snapshot.models.iter().map(|model| model.name.as_str()).collect();
            timeline.tell(&names, snapshot.now)
        })
    }
}

fn fresh<T: Serialize>(kept: &mut Option<(Instant, Bytes)>, make: impl FnOnce() -> T) -> Bytes {
    if let Some((_, text)) = kept.as_ref().filter(|(made, _)| made.elapsed() < FRESH) {
        return text.clone();
    }
    let text = Bytes::from(serde_json::to_vec(&make()).unwrap_or_else(|error| {
        tracing::error!(%error, "a document could not be written");
        b"null".to_vec()
    }));
    *kept = Some((Instant::now(), text.clone()));
    text
}

/// The server, actor by actor.
pub async fn actors(app: Data<App>) -> HttpResponse {
    HttpResponse::Ok().content_type("application/json").body(app.dashboard.state(&app))
}

/// The state twice a second and the latest requests once a second, until the server stops.
pub async fn events(app: web::Data<App>) -> HttpResponse {
    HttpResponse::Ok()
        .content_type("text/event-stream")
        .insert_header((header::CACHE_CONTROL, "no-cache"))
        .insert_header(("X-Accel-Buffering", "no"))
        .streaming(stream(app))
}

fn stream(app: Data<App>) -> impl Stream<Item = Result<Bytes, Infallible>> {
    let mut ticks = interval(EVERY);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    unfold((app, ticks, 0u64), |(app, ticks, count): (Data<App>, Interval, u64)| async move {
        let mut ticks = ticks;
        ticks.tick().await;
        if !app.engine.is_open() {
            return None;
        }
        let mut text = event("state", &app.dashboard.state(&app));
        if count % 2 == 0 {
            text.extend(event("requests", &app.dashboard.requests(&app)));
        }
        Some((Ok(Bytes::from(text)), (app, ticks, count + 1)))
    })
}

fn event(name: &str, data: &[u8]) -> Vec<u8> {
    [b"event: ", name.as_bytes(), b"\ndata: ", data, b"\n\n"].concat()
}
