//! The files of the page, which are part of the program: `npm run build` in `api/dashboard` writes them. Owner: nobody; they
//! are constant. Invariant: no answer of another origin is needed or allowed, and they say nothing about the server, so they
//! need no key.

use super::only;
use actix_web::http::header::{self, HeaderValue};
use actix_web::{HttpRequest, HttpResponse, guard, web};
use ring::digest::{SHA256, digest};
use std::sync::LazyLock;

/// Only files of this server, no inline scripts or styles, in no frame.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; \
                      base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

/// Asked for each time, so that a new version is seen at once; an unchanged file is not sent again.
const CACHING: &str = "no-cache";

/// Where people end up who ask for something shorter. It is relative, so that the server may lie behind a prefix.
const PAGE: &str = "dashboard/";
const SHORTER: [&str; 2] = ["/", "/dashboard"];

/// A file.
struct Asset {
    path: &'static str,
    media_type: &'static str,
    bytes: &'static [u8],
}

static ASSETS: [Asset; 3] = [
    Asset {
        path: "/dashboard/",
        media_type: "text/html; charset=utf-8",
        bytes: include_bytes!("../../../dashboard/dist/index.html"),
    },
    Asset {
        path: "/dashboard/assets/app.js",
        media_type: "text/javascript; charset=utf-8",
        bytes: include_bytes!("../../../dashboard/dist/assets/app.js"),
    },
    Asset {
        path: "/dashboard/assets/app.css",
        media_type: "text/css; charset=utf-8",
        bytes: include_bytes!("../../../dashboard/dist/assets/app.css"),
    },
];

/// By place in [`ASSETS`].
static TAGS: LazyLock<Vec<String>> = LazyLock::new(|| ASSETS.iter().map(|asset| tag(asset.bytes)).collect());

fn tag(bytes: &[u8]) -> String {
    let hash: String = digest(&SHA256, bytes).as_ref().iter().take(16).map(|byte| format!("{byte:02x}")).collect();
    format!("\"{hash}\"")
}

/// Whether a path is answered by what anybody may have.
pub fn is_page(path: &str) -> bool {
    SHORTER.contains(&path) || ASSETS.iter().any(|asset| asset.path == path)
}

/// Their routes.
pub fn configure(config: &mut web::ServiceConfig) {
    let looks = || web::route().guard(guard::Any(guard::Get()).or(guard::Head()));
    for path in SHORTER {
        let there = || async { HttpResponse::SeeOther().insert_header((header::LOCATION, PAGE)).finish() };
        config.service(web::resource(path).route(looks().to(there)).default_service(only("GET, HEAD")));
    }
    for (index, asset) in ASSETS.iter().enumerate() {
        let file = move |request: HttpRequest| async move { answer(&request, asset, &TAGS[index]) };
        config.service(web::resource(asset.path).route(looks().to(file)).default_service(only("GET, HEAD")));
    }
}

fn answer(request: &HttpRequest, asset: &'static Asset, tag: &'static str) -> HttpResponse {
    let known = request.headers().get(header::IF_NONE_MATCH).is_some_and(|sent| has(sent, tag));
    let mut answer = if known { HttpResponse::NotModified() } else { HttpResponse::Ok() };
    answer
        .insert_header((header::ETAG, tag))
        .insert_header((header::CACHE_CONTROL, CACHING))
        .insert_header((header::CONTENT_SECURITY_POLICY, POLICY))
        .insert_header((header::X_CONTENT_TYPE_OPTIONS, "nosniff"))
        .insert_header((header::REFERRER_POLICY, "no-referrer"));
    if known { answer.finish() } else { answer.content_type(asset.media_type).body(asset.bytes) }
}

/// Whether the client has this version; a tag may be marked as weak.
fn has(sent: &HeaderValue, tag: &str) -> bool {
    sent.to_str().is_ok_and(|tags| {
        tags.split(',').map(|one| one.trim().trim_start_matches("W/")).any(|one| one == tag || one == "*")
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use actix_web::dev::ServiceResponse;
    use actix_web::http::{Method, StatusCode};
    use actix_web::{App, test};

    async fn ask(method: Method, path: &str, tag: Option<&str>) -> ServiceResponse {
        let app = test::init_service(App::new().configure(configure)).await;
        let request = test::TestRequest::with_uri(path).method(method);
        let request = tag.into_iter().fold(request, |request, tag| request.insert_header((header::IF_NONE_MATCH, tag)));
        test::call_service(&app, request.to_request()).await
    }

    fn header<'a>(answer: &'a ServiceResponse, name: &str) -> &'a str {
        answer.headers().get(name).and_then(|value| value.to_str().ok()).unwrap_or_default()
    }

    #[actix_rt::test]
    async fn files_come_with_their_type_and_under_a_strict_policy() {
        for asset in &ASSETS {
            let answer = ask(Method::GET, asset.path, None).await;
            assert_eq!(answer.status(), StatusCode::OK, "{}", asset.path);
            assert_eq!(header(&answer, "content-type"), asset.media_type);
            assert_eq!(header(&answer, "x-content-type-options"), "nosniff");
            let policy = header(&answer, "content-security-policy");
            assert!(policy.starts_with("default-src 'none'") && !policy.contains("unsafe"), "{policy}");
            assert_eq!(test::read_body(answer).await, asset.bytes);
        }
    }

    #[actix_rt::test]
    async fn what_the_client_has_is_not_sent_again() {
        let tag = header(&ask(Method::GET, "/dashboard/", None).await, "etag").to_owned();
        for sent in [tag.clone(), format!("W/{tag}"), format!("\"other\", {tag}"), "*".to_owned()] {
            let answer = ask(Method::GET, "/dashboard/", Some(&sent)).await;
            assert_eq!(answer.status(), StatusCode::NOT_MODIFIED, "{sent}");
            assert!(test::read_body(answer).await.is_empty());
        }
        let answer = ask(Method::GET, "/dashboard/assets/app.js", Some(&tag)).await;
        assert_eq!(answer.status(), StatusCode::OK, "each file has its own");
    }

    #[actix_rt::test]
    async fn shorter_addresses_lead_to_the_page() {
        for path in SHORTER {
            for method in [Method::GET, Method::HEAD] {
                let answer = ask(method, path, None).await;
                assert_eq!((answer.status(), header(&answer, "location")), (StatusCode::SEE_OTHER, PAGE), "{path}");
            }
        }
        assert_eq!(ask(Method::POST, "/dashboard/", None).await.status(), StatusCode::METHOD_NOT_ALLOWED);
    }

    #[::core::prelude::v1::test]
    fn the_page_is_open_and_nothing_beside_it() {
        assert!(ASSETS.iter().all(|asset| is_page(asset.path)) && SHORTER.iter().all(|path| is_page(path)));
        for closed in
            ["/dashboard/events", "/dashboard/assets/", "/dashboard//", "/actors", "/dashboard/assets/app.js/"]
        {
            assert!(!is_page(closed), "{closed}");
        }
        let operations = crate::http::operations::OPERATIONS;
        assert!(
            operations.iter().all(|one| !is_page(one.path)),
            "the API's document is for programs, the page for people"
        );
    }
}
