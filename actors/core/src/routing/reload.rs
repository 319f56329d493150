//! An algorithm that can be replaced while the server runs. Owner: the runtime reads it, whoever reloads replaces it.
//! Invariant: a request keeps the version it started with at every model; a version lives as long as a request follows
//! it, and until then its signals are computed.

use super::{Algorithm, Handoff, HeadSpec, Prior, Route, RoutingError, StepView, Suffix};
use crate::executor::Needs;
use crate::ids::{ModelIdx, TokenId};
use crate::peer::{PeerError, PeerReq};
use crate::routing::Decision;
use serde_json::Value;
use std::fmt;
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, Weak};

/// The current algorithm behind a lock that is held for moments only.
pub struct Reloadable {
    models: usize,
    versions: RwLock<Versions>,
}

struct Versions {
    now: Arc<Version>,
    former: Vec<Weak<Version>>,
}

/// One of the algorithms, in its place in time.
#[derive(Clone)]
struct Version {
    number: u32,
    algorithm: Arc<dyn Algorithm>,
}

impl fmt::Debug for Reloadable {
    /// As the current algorithm describes itself: processes of one server compare it.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.now().algorithm.fmt(f)
    }
}

impl Reloadable {
    /// Starts with this algorithm, for so many models.
    pub fn new(algorithm: Arc<dyn Algorithm>, models: usize) -> Self {
        let now = Arc::new(Version { number: 0, algorithm });
        Reloadable { models, versions: RwLock::new(Versions { now, former: Vec::new() }) }
    }

    /// New requests follow this algorithm from now on.
    ///
    /// # Errors
    /// When it reads a learned head that is not loaded; the current one stays then.
    pub fn replace(&self, algorithm: Arc<dyn Algorithm>) -> Result<(), String> {
        let mut versions = self.versions.write().unwrap_or_else(PoisonError::into_inner);
        for model in (0..self.models).map(|model| ModelIdx(model as u8)) {
            let (has, wants) = (versions.now.algorithm.head(model), algorithm.head(model));
            if wants.is_some() && wants != has {
                return Err(format!(
                    "it reads another learned head at model {model} than is loaded; heads are loaded at the start: \
                     start the server again"
                ));
            }
        }
        let now = Arc::new(Version { number: versions.now.number + 1, algorithm });
        let before = std::mem::replace(&mut versions.now, now);
        versions.former.retain(|version| version.strong_count() > 0);
        versions.former.push(Arc::downgrade(&before));
        Ok(())
    }

    fn read(&self) -> RwLockReadGuard<'_, Versions> {
        self.versions.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn now(&self) -> Arc<Version> {
        Arc::clone(&self.read().now)
    }
}

impl Algorithm for Reloadable {
    fn needs(&self, model: ModelIdx) -> Needs {
        let versions = self.read();
        let former = versions.former.iter().filter_map(Weak::upgrade).map(|version| version.algorithm.needs(model));
        former.fold(versions.now.algorithm.needs(model), Needs::union)
    }

    fn entry(&self, seed: u64) -> ModelIdx {
        self.now().algorithm.entry(seed)
    }

    fn prior(&self) -> Prior {
        self.now().algorithm.prior()
    }

    fn start(&self) -> Box<dyn Route> {
        Pinned::of(self.now()).start()
    }

    fn head(&self, model: ModelIdx) -> Option<HeadSpec> {
        self.now().algorithm.head(model)
    }

    fn with(&self, overrides: &Value) -> Result<Box<dyn Algorithm>, RoutingError> {
        Pinned::of(self.now()).with(overrides)
    }

    fn greedy_warning(&self) -> Option<&'static str> {
        self.now().algorithm.greedy_warning()
    }

    fn version(&self) -> u32 {
        self.now().number
    }

    fn at(&self, version: u32) -> Option<Arc<dyn Algorithm>> {
        let versions = self.read();
        let former = versions.former.iter().filter_map(Weak::upgrade);
        let found = std::iter::once(Arc::clone(&versions.now)).chain(former).find(|found| found.number == version);
        found.map(|found| Arc::new(Pinned::of(found)) as Arc<dyn Algorithm>)
    }
}

/// An algorithm, perhaps with parameters of a request, of one version that must live as long.
struct Pinned {
    algorithm: Arc<dyn Algorithm>,
    version: Arc<Version>,
}

impl Pinned {
    fn of(version: Arc<Version>) -> Self {
        Pinned { algorithm: Arc::clone(&version.algorithm), version }
    }
}

impl fmt::Debug for Pinned {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.algorithm.fmt(f)
    }
}

impl Algorithm for Pinned {
    fn needs(&self, model: ModelIdx) -> Needs {
        self.algorithm.needs(model)
    }

    fn entry(&self, seed: u64) -> ModelIdx {
        self.algorithm.entry(seed)
    }

    fn prior(&self) -> Prior {
        self.algorithm.prior()
    }

    fn start(&self) -> Box<dyn Route> {
        Box::new(PinnedRoute { route: self.algorithm.start(), _version: Arc::clone(&self.version) })
    }

    fn head(&self, model: ModelIdx) -> Option<HeadSpec> {
        self.algorithm.head(model)
    }

    fn with(&self, overrides: &Value) -> Result<Box<dyn Algorithm>, RoutingError> {
        let algorithm = self.algorithm.with(overrides)?.into();
        Ok(Box::new(Pinned { algorithm, version: Arc::clone(&self.version) }))
    }
}

struct PinnedRoute {
    route: Box<dyn Route>,
    _version: Arc<Version>,
}

impl fmt::Debug for PinnedRoute {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.route.fmt(f)
    }
}

impl Route for PinnedRoute {
    fn route(&mut self, step: &StepView<'_>) -> Result<Decision, String> {
        self.route.route(step)
    }

    fn send(&mut self, handoff: &Handoff<'_>) -> Result<Suffix, String> {
        self.route.send(handoff)
    }

    fn receive(&mut self, tokens: &mut Vec<TokenId>, message: &PeerReq) -> Result<(), PeerError> {
        self.route.receive(tokens, message)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::executor::Signals;
    use crate::ids::RequestId;
    use crate::routing::build;
    use serde_json::json;

    fn to(route: &mut Box<dyn Route>) -> u8 {
        let signals = Signals::default();
        let step = StepView {
            request: RequestId(1),
            model: ModelIdx(0),
            seed: 1,
            prompt_len: 1,
            tokens: &[1],
            candidate: 2,
            signals: &signals,
        };
        route.route(&step).unwrap().to.0
    }

    fn matrix(first: [f64; 2]) -> Arc<dyn Algorithm> {
        build("bernoulli", &json!({ "p": [first, [1.0, 0.0]] }), 2).unwrap()
    }

    #[test]
    fn a_request_keeps_its_version_at_every_model() {
        let router = Reloadable::new(matrix([1.0, 0.0]), 2);
        let (old, mut here) = (router.version(), router.start());
        router.replace(matrix([0.0, 1.0])).unwrap();
        assert_eq!(to(&mut here), 0);
        assert_eq!(to(&mut router.at(old).expect("a request follows it").start()), 0, "at the peer too");
        assert_eq!(to(&mut router.start()), 1);
        drop(here);
        assert!(router.at(old).is_none(), "nobody follows it any more");
        assert_eq!(to(&mut router.at(router.version()).expect("the current one").start()), 1);
    }

    #[test]
    fn signals_of_old_versions_are_computed_until_their_requests_end() {
        let entropy = |router: &Reloadable| router.needs(ModelIdx(0)).entropy;
        let router = Reloadable::new(build("r_stitch", &json!({}), 2).unwrap(), 2);
        let follows = router.with(&json!({ "threshold": 0.5 })).unwrap().start();
        router.replace(matrix([1.0, 0.0])).unwrap();
        assert!(entropy(&router));
        drop(follows);
        assert!(!entropy(&router));
    }

    #[test]
    fn a_head_that_is_not_loaded_is_refused() {
        let router = Reloadable::new(matrix([1.0, 0.0]), 2);
        let table = json!({ "file": "a.rhai", "source":
            "fn needs() { #{ score: true, head: #{ family: \"citer\", path: \"x\" } } } fn route(step) { 0 }" });
        let wants_head = build("script", &table, 2).unwrap();
        let error = router.replace(Arc::clone(&wants_head)).unwrap_err();
        assert!(error.contains("another learned head at model m0"), "{error}");
        assert_eq!(router.version(), 0);
        Reloadable::new(wants_head.clone(), 2).replace(wants_head).unwrap();
    }
}
