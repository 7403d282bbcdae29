"""Large jobs.

run_batch         a file of requests in OpenAI's batch format, and its results
openai_format     prompts and parameters of a request's body, and its response
openai_responses  the parts of a response, and errors
ray_data          datasets on many machines
lm_eval           the tasks of lm_eval
"""
