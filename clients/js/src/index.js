/** Headwater for browsers: queries that stay fresh, and tables that are followed. */

export {LiveQuery, RequestFailed} from "./live_query.js";
export {tail} from "./tail.js";
export {Answer, PatchMismatch} from "./answer.js";
export {plain} from "./literal.js";
export {parse} from "./json_text.js";
