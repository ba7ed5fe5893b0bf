-- Requests for wrk that differ in a number, so that nothing can answer two of them alike: the body from a file with
-- NUMBER where it goes, the key and the first number from the environment. One line of figures at the end.
local file = assert(io.open(os.getenv("BENCH_BODY"), "rb"))
wrk.method = "POST"
wrk.body = file:read("*a")
file:close()
wrk.headers["Content-Type"] = "application/json"
wrk.headers["Authorization"] = "Bearer " .. os.getenv("BENCH_KEY")

local number = tonumber(os.getenv("BENCH_FIRST"))
local delay_ms = tonumber(os.getenv("BENCH_DELAY_MS"))
local before, after

-- Its being there makes wrk wait, so it is there only when asked for.
if delay_ms then
  function delay()
    return delay_ms
  end
end

function init(args)
  -- Formatted once: the load must stay far lighter than what it measures.
  local whole = wrk.format()
  local from, to = string.find(whole, "NUMBER", 1, true)
  before, after = string.sub(whole, 1, from - 1), string.sub(whole, to + 1)
end

function request()
  number = number + 1
  return before .. string.format("%06d", number % 1000000) .. after
end

function done(summary, latency, requests)
  local errors = summary.errors
  io.write(string.format(
    'FIGURES {"num_requests": %d, "duration_us": %d, "p50_us": %d, "p99_us": %d, "num_errors": %d}\n',
    summary.requests, summary.duration, latency:percentile(50), latency:percentile(99),
    errors.connect + errors.read + errors.write + errors.status + errors.timeout))
end
