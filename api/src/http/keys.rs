//! Who may ask: API keys and the admin key. Owner: the `App`; the serve command replaces them. Invariant: only digests of
//! keys are kept, all of them are compared whatever the first ones say, and without a right key nothing answers but `/health`,
//! `/ready` and the files of the dashboard's page.

use super::App;
use super::dashboard::is_page;
use super::errors::ApiError;
use actix_web::body::{EitherBody, MessageBody};
use actix_web::dev::{ServiceRequest, ServiceResponse};
use actix_web::http::header::{self, HeaderMap};
use actix_web::middleware::Next;
use actix_web::{HttpRequest, ResponseError, web};
use ring::digest::{SHA256, digest};
use std::fmt;
use std::sync::{Arc, PoisonError, RwLock};
use subtle::{Choice, ConstantTimeEq};

/// Answer without a key, so that whoever watches the server needs none.
pub(super) const OPEN: [&str; 2] = ["/health", "/ready"];

const DIGEST_BYTES: usize = 32;

type Digest = [u8; DIGEST_BYTES];

/// The keys of a server; none by default. Clones are the same keys: what replaces one replaces all.
#[derive(Clone, Default)]
pub struct Keys(Arc<RwLock<Arc<Digests>>>);

#[derive(Default)]
struct Digests {
    api: Vec<Digest>,
    admin: Option<Digest>,
}

impl fmt::Debug for Keys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let keys = self.now();
        write!(f, "Keys({} for the API, admin: {})", keys.api.len(), keys.admin.is_some())
    }
}

/// What a presented key opens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Opens {
    Nothing,
    Api,
    Everything,
}

impl Keys {
    /// These keys for the API, and one for `/admin`, which opens the API too.
    pub fn new<'a>(api: impl IntoIterator<Item = &'a str>, admin: Option<&str>) -> Keys {
        let digests = Digests { api: api.into_iter().map(hash).collect(), admin: admin.map(hash) };
        Keys(Arc::new(RwLock::new(Arc::new(digests))))
    }

    fn now(&self) -> Arc<Digests> {
        Arc::clone(&self.0.read().unwrap_or_else(PoisonError::into_inner))
    }

    /// From the next request on these keys count, and no others.
    pub fn replace(&self, keys: &Keys) {
        let new = keys.now();
        *self.0.write().unwrap_or_else(PoisonError::into_inner) = new;
    }

    /// Whether the API asks for a key.
    pub fn guard_api(&self) -> bool {
        !self.now().api.is_empty()
    }

    /// Whether there is an admin key.
    pub fn guard_admin(&self) -> bool {
        self.now().admin.is_some()
    }

    fn opens(&self, presented: &str) -> Opens {
        let (keys, presented) = (self.now(), hash(presented));
        let same = |key: &Digest| key.ct_eq(&presented);
        let api = keys.api.iter().map(same).fold(Choice::from(0), |found, same| found | same);
        let admin = keys.admin.as_ref().map_or(Choice::from(0), same);
        match (bool::from(admin), bool::from(api)) {
            (true, _) => Opens::Everything,
            (false, true) => Opens::Api,
            (false, false) => Opens::Nothing,
        }
    }

    /// Whether a request may reach the routes at all.
    fn admit(&self, path: &str, headers: &HeaderMap) -> Result<(), ApiError> {
        if !self.guard_api() || OPEN.contains(&path) || is_page(path) {
            return Ok(());
        }
        match presented(headers).map(|key| self.opens(key)) {
            None => Err(ApiError::unauthorized("no API key; send the header Authorization: Bearer KEY")),
            Some(Opens::Nothing) => Err(ApiError::unauthorized("the API key is not valid")),
            Some(Opens::Api | Opens::Everything) => Ok(()),
        }
    }

    /// Whether a request may change the server: by the admin key, or from its own machine where there is none.
    ///
    /// # Errors
    /// 401 without a key, 403 with one that is not enough, 403 for clients of other machines.
    pub fn administer(&self, request: &HttpRequest) -> Result<(), ApiError> {
        if !self.guard_admin() {
            let here = request.peer_addr().is_some_and(|peer| peer.ip().to_canonical().is_loopback());
            let refused = "only clients on the server's machine may do this, or clients with its admin key";
            return if here { Ok(()) } else { Err(ApiError::forbidden(refused)) };
        }
        match presented(request.headers()).map(|key| self.opens(key)) {
            None => Err(ApiError::unauthorized("no admin key; send the header Authorization: Bearer KEY")),
            Some(Opens::Nothing) => Err(ApiError::unauthorized("the admin key is not valid")),
            Some(Opens::Api) => Err(ApiError::forbidden("an API key is not enough here; send the admin key")),
            Some(Opens::Everything) => Ok(()),
        }
    }
}

fn hash(key: &str) -> Digest {
    let mut out = [0; DIGEST_BYTES];
    out.copy_from_slice(digest(&SHA256, key.as_bytes()).as_ref());
    out
}

/// The key a client sent: `Authorization: Bearer KEY`, or else `X-Api-Key: KEY`.
fn presented(headers: &HeaderMap) -> Option<&str> {
    let bearer = headers.get(header::AUTHORIZATION).and_then(|value| {
        let (scheme, key) = value.to_str().ok()?.split_once(' ')?;
        scheme.eq_ignore_ascii_case("bearer").then(|| key.trim())
    });
    bearer.or_else(|| headers.get("x-api-key")?.to_str().ok())
}

/// The middleware, inside `super::observe` so that what is refused has an id and is counted.
///
/// # Errors
/// Passes on what the service inside could not answer.
pub async fn guard<B: MessageBody>(
    request: ServiceRequest,
    next: Next<B>,
) -> Result<ServiceResponse<EitherBody<B>>, actix_web::Error> {
    let admitted = match request.app_data::<web::Data<App>>() {
        Some(app) => app.keys.admit(request.path(), request.headers()),
        None => Err(ApiError::internal("the keys of the server are not known")),
    };
    match admitted {
        Ok(()) => next.call(request).await.map(ServiceResponse::map_into_left_body),
        Err(error) => Ok(request.into_response(error.error_response()).map_into_right_body()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use actix_web::test::TestRequest;

    fn sent(name: &str, value: &str) -> HeaderMap {
        TestRequest::default().insert_header((name, value)).to_http_request().headers().clone()
    }

    #[test]
    fn a_key_comes_in_either_header() {
        for (name, value, key) in [
            ("authorization", "Bearer abc", Some("abc")),
            ("authorization", "bearer  abc ", Some("abc")),
            ("authorization", "Basic abc", None),
            ("authorization", "abc", None),
            ("x-api-key", "abc", Some("abc")),
            ("cookie", "abc", None),
        ] {
            assert_eq!(presented(&sent(name, value)), key, "{name}: {value}");
        }
    }

    #[test]
    fn every_key_opens_and_no_other() {
        let keys = Keys::new(["first-key", "second-key"], Some("admin-key"));
        for (key, opens) in [
            ("first-key", Opens::Api),
            ("second-key", Opens::Api),
            ("admin-key", Opens::Everything),
            ("first-ke", Opens::Nothing),
            ("first-key ", Opens::Nothing),
            ("", Opens::Nothing),
        ] {
            assert_eq!(keys.opens(key), opens, "{key}");
        }
        assert_eq!(format!("{keys:?}"), "Keys(2 for the API, admin: true)");
        assert_eq!(Keys::default().opens(""), Opens::Nothing);
    }

    #[test]
    fn only_the_open_paths_need_no_key() {
        let keys = Keys::new(["first-key"], None);
        let none = HeaderMap::new();
        for open in [OPEN.as_slice(), &["/", "/dashboard", "/dashboard/", "/dashboard/assets/app.js"]].concat() {
            assert_eq!(keys.admit(open, &none), Ok(()));
        }
        for path in ["/v1/models", "/metrics", "/health/", "/%68ealth", "/nothing", "/actors", "/dashboard/events"] {
            assert_eq!(keys.admit(path, &none).map_err(|error| error.status().as_u16()), Err(401), "{path}");
            let wrong = keys.admit(path, &sent("x-api-key", "wrong-key"));
            assert_eq!(wrong.map_err(|error| error.status().as_u16()), Err(401), "{path}");
            assert_eq!(keys.admit(path, &sent("authorization", "Bearer first-key")), Ok(()), "{path}");
        }
        assert_eq!(Keys::new([], Some("admin-key")).admit("/v1/models", &none), Ok(()), "no API keys: the API is open");
    }

    #[test]
    fn the_admin_key_decides_where_there_is_one() {
        let ask = |peer: &str, key: Option<&str>| {
            let request = TestRequest::default().peer_addr(peer.parse().expect("an address"));
            let request = key.into_iter().fold(request, |request, key| request.insert_header(("x-api-key", key)));
            request.to_http_request()
        };
        let keys = Keys::new(["first-key"], Some("admin-key"));
        let status =
            |keys: &Keys, request: &HttpRequest| keys.administer(request).map_err(|error| error.status().as_u16());
        assert_eq!(status(&keys, &ask("127.0.0.1:9", None)), Err(401));
        assert_eq!(status(&keys, &ask("127.0.0.1:9", Some("wrong-key"))), Err(401));
        assert_eq!(status(&keys, &ask("127.0.0.1:9", Some("first-key"))), Err(403));
        assert_eq!(status(&keys, &ask("192.0.2.7:9", Some("admin-key"))), Ok(()));
        let none = Keys::new(["first-key"], None);
        assert_eq!(status(&none, &ask("[::ffff:127.0.0.1]:9", None)), Ok(()));
        assert_eq!(status(&none, &ask("192.0.2.7:9", Some("first-key"))), Err(403));
    }
}
